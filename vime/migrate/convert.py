"""The flags of a launch script as a configuration, and what became of each."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from vime.config.load import ConfigError, impossible, options, parse_value, read
from vime.config.nearest import nearest
from vime.config.sections import Config
from vime.config.slime import Slime
from vime.inference.commands import OURS_VLLM
from vime.migrate import rules, table
from vime.migrate.rules import Given, Unfit
from vime.migrate.script import Flag, Script
from vime.slime.flags import OPTIONS

MAPPED, NOTHING, MISSING, UNKNOWN = "mapped", "nothing to set", "no counterpart", "unknown"
NOT_NEEDED = {name: reason for reason, names in table.REASONS.items() for name in names}
WITHOUT = {name: reason for reason, names in table.MISSING.items() for name in names}
KINDS = {name: found.annotation for name, found, _ in options(Config)}
KNOWN = [*OPTIONS, *rules.RULES, *NOT_NEEDED, *WITHOUT, *table.SGLANG, *table.SGLANG_SWITCHES, *Slime.model_fields]


@dataclass(frozen=True)
class Row:
    """What became of one flag: the options of ours in ``ours``, why in ``note``."""

    flag: str
    value: str
    verdict: str
    ours: str = ""
    note: str = ""


@dataclass(frozen=True)
class Migration:
    """``toml`` is the configuration; ``faults`` are what it lacks or cannot hold, but for paths that are not here."""

    toml: str
    rows: list[Row]
    notes: list[str]
    faults: list[str]


def migrate(path: Path) -> Migration:
    """Reads the launch script; ScriptError where it cannot."""
    script = Script(path)
    flags = script.flags()
    given = Given({flag.name: flag for flag in flags}, script.asynchronous)
    tree: dict[str, Any] = {}
    rows = []
    for flag in flags:
        row, found = convert(flag, given)
        rows.append(row)
        for name, value in found.items():
            put(tree, name, value)
    if script.asynchronous:
        put(tree, "rollout.max_staleness", 1)
        given.notes.append(
            "train_async.py: the next batch is made while the trainer learns (rollout.max_staleness = 1)"
        )
    if "advantage_estimator" not in given:  # slime's default
        for name, value in rules.estimator(given, ["grpo"]).items():  # type: ignore[union-attr]
            put(tree, name, value)
    if "apply_chat_template" not in given:
        given.notes.append(
            "without --apply-chat-template prompts went as they are; vime renders them by the chat template"
        )
    if "label_key" not in given:
        put(tree, "data.answer_key", "label")
    if "input_key" not in given:
        put(tree, "data.prompt_key", "input")
    toml = tomli_w.dumps(ordered(tree))
    return Migration(toml, rows, [*script.notes, *dict.fromkeys(given.notes)], faults_of(toml))


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".") if not name.startswith("vllm.") else ["vllm", name.removeprefix("vllm.")]
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def ordered(tree: dict[str, Any]) -> dict[str, Any]:
    """Sections in the order of the reference."""
    return {name: tree[name] for name in Config.model_fields if name in tree}


def faults_of(toml: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(toml)
        try:
            found = impossible(read(file, (), Config))
        except ConfigError as error:
            return str(error).splitlines()
    return [fault for fault in found if "holds no config.json" not in fault]


def convert(flag: Flag, given: Given) -> tuple[Row, dict[str, Any]]:
    """The flag's row, and the options that it sets."""
    name, value = flag.name, "(not shown)" if flag.name.endswith("wandb_key") else " ".join(flag.values)
    shown = "--" + name.replace("_", "-")
    several = f"given {flag.times} times, the last counts" if flag.times > 1 else ""

    def row(verdict: str, ours: str = "", note: str = "") -> Row:
        return Row(shown, value, verdict, ours, "; ".join(part for part in (note, several) if part))

    try:
        if any("$" in one for one in flag.values):
            if name in NOT_NEEDED:
                return row(NOTHING, note=NOT_NEEDED[name]), {}
            raise Unfit("its value is not known without running the script; set it by hand")
        made = rule_of(name)(given, flag.values)
        found, note = made if isinstance(made, tuple) else (made, "")
    except Unfit as error:
        return row(MISSING, note=str(error)), {}
    except IndexError:
        return row(MISSING, note="it has no value; set it by hand"), {}
    except LookupError:
        hint = nearest(name, KNOWN)
        close = hint.removeprefix("; ").replace("_", "-") if "did you mean" in hint else ""
        return row(UNKNOWN, note=f"no flag that is known{f': {close}' if close else ''}; what it does is not done"), {}
    return row(MAPPED if found else NOTHING, ", ".join(f"{k} = {said(v)}" for k, v in found.items()), note), found


def said(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(said, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {said(one)}" for name, one in value.items()) + "}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip().replace("\n", " ")


def rule_of(name: str) -> rules.Rule:
    """What becomes of the flag; LookupError for one that is not known."""
    if name in table.CRITIC_ONLY:
        return critic_only(name)
    if name in table.NOTHING_AT:
        wanted = float(table.NOTHING_AT[name])
        return lambda given, values: ({}, "as always") if rules.number(values[0]) == wanted else refused(WITHOUT[name])
    if name in rules.RULES:
        return rules.RULES[name]
    if name in OPTIONS:
        return lambda given, values: {OPTIONS[name]: typed(OPTIONS[name], values)}
    if name in NOT_NEEDED:
        return lambda given, values: ({}, NOT_NEEDED[name])
    if name in Slime.model_fields:
        return slime_option(name)
    if name in WITHOUT:
        return lambda given, values: refused(WITHOUT[name])
    if name in table.SGLANG_SWITCHES:
        flag, switch = table.SGLANG_SWITCHES[name]
        return lambda given, values: {f"vllm.{flag}": switch}
    if name in table.SGLANG:
        return lambda given, values: {f"vllm.{table.SGLANG[name]}": server_value(values)}
    if name.startswith("vllm_"):
        return vllm_flag(name.removeprefix("vllm_").replace("_", "-"))
    if name.startswith("sglang_"):
        return lambda given, values: refused("a flag of SGLang; see whether vLLM has one, for [vllm]")
    if name.startswith("router_"):
        return lambda given, values: {f"router.{name.removeprefix('router_').replace('_', '-')}": server_value(values)}
    raise LookupError(name)


def refused(reason: str) -> Any:
    raise Unfit(reason)


def critic_only(name: str) -> rules.Rule:
    def rule(given: Given, values: list[str]) -> Any:
        if given.text("advantage_estimator") != "ppo":
            return {}, "there is no critic"
        return {OPTIONS[name]: typed(OPTIONS[name], values)}

    return rule


def slime_option(name: str) -> rules.Rule:
    def rule(given: Given, values: list[str]) -> Any:
        if name.endswith("_path"):
            return rules.function(given, name, values)
        return {f"slime.{name}": values[0] if values else True}

    return rule


def vllm_flag(flag: str) -> rules.Rule:
    def rule(given: Given, values: list[str]) -> Any:
        if flag in OURS_VLLM:
            return refused(f"vime sets it itself: {OURS_VLLM[flag]}")
        return {f"vllm.{flag}": server_value(values)}

    return rule


def server_value(values: Sequence[str]) -> Any:
    """A server flag's value as TOML has it; True for a switch."""
    if not values:
        return True
    parsed = [text if isinstance(value := parse_value(text), (dict, list)) else value for text in values]
    return parsed[0] if len(parsed) == 1 else parsed


def typed(option: str, values: Sequence[str]) -> Any:
    """The value in the kind that the option has."""
    text, kind = " ".join(values), str(KINDS[option])
    if not values:
        raise IndexError
    if "float" in kind:
        return rules.number(text)
    if "int" in kind:
        return int(rules.number(text))
    return text
