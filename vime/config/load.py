"""From a TOML file and ``--section.key value`` overrides to a checked Config.

Everything wrong is said at once, each with the key, the value and the fix, before anything starts.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vime.config.algorithms import impossible_algorithms
from vime.config.nearest import nearest
from vime.config.rewards import impossible_rewards
from vime.config.sections import Config


class ConfigError(Exception):
    """The configuration cannot be run; the message has one line a fault."""


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The Section class in an annotation such as ``Run`` or ``dict[str, EvalSet]``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def options(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every option as (dotted name, field, explanation), in the order they are defined."""
    for name, field in model.model_fields.items():
        inner = section_class(field.annotation)
        if inner is None:
            yield f"{prefix}{name}", field, field.description or ""
        else:
            star = "NAME." if get_origin(field.annotation) is dict else ""
            yield from options(inner, f"{prefix}{name}.{star}")


def parse_value(text: str) -> Any:
    """A command-line value as TOML would read it; what is no TOML value is text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def parse_overrides(words: Sequence[str]) -> list[tuple[list[str], Any]]:
    """``--a.b value`` and ``--a.b=value`` pairs; raises ConfigError for anything else."""
    pairs = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--") or "." not in word.split("=", 1)[0]:
            raise ConfigError(f"unexpected argument {word!r}; overrides are written --section.key value")
        key, given, value = word[2:].partition("=")
        if not given:
            if not queue:
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
            value = queue.pop(0)
        pairs.append((key.split("."), parse_value(value)))
    return pairs


def apply_override(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{'.'.join(path)}: {name} is a value, not a section")
    tree[path[-1]] = value


def allowed(annotation: Any) -> str:
    """What a value may be, in words: ``float32 | bfloat16``."""
    if annotation is type(None):
        return "none"
    if get_origin(annotation) is Annotated:
        return allowed(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(allowed(part) for part in get_args(annotation))
    literals = [str(v) for v in get_args(annotation) if isinstance(v, str)]
    return " | ".join(literals) or getattr(annotation, "__name__", str(annotation).replace("typing.", ""))


def keys_at(location: tuple[Any, ...]) -> list[str]:
    """The keys known in the section that ``location`` names."""
    model: type[BaseModel] | None = Config
    for part in location:
        if model is None:
            return []
        field = model.model_fields.get(str(part))
        model = section_class(field.annotation) if field else model
    return list(model.model_fields) if model else []


def explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"{key} is not an option{nearest(str(fault['loc'][-1]), keys_at(fault['loc'][:-1]))}")
        elif fault["type"] == "missing":
            lines.append(f"{key} is missing; set it in the file or with --{key} VALUE")
        else:
            lines.append(f"{key} = {json.dumps(fault['input'], default=str)}: {fault['msg'].lower()}")
    return "\n".join(dict.fromkeys(lines))


def impossible(config: Config) -> list[str]:
    """Combinations that cannot work, each with its fix."""
    rollout, algorithm, faults = config.rollout, config.algorithm, impossible_algorithms(config)
    faults += impossible_rewards(config)
    if rollout.top_p != 1.0 or rollout.top_k != -1:
        faults.append(
            f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: the server would renormalise over the "
            "kept tokens and the trainer would not; set top_p = 1.0 and top_k = -1"
        )
    if rollout.max_staleness != 0:
        faults.append(f"rollout.max_staleness = {rollout.max_staleness}: only the synchronous loop exists; set it to 0")
    if rollout.groups % algorithm.updates:
        faults.append(
            f"algorithm.updates = {algorithm.updates} does not divide rollout.groups = {rollout.groups}; "
            "set groups to a multiple of it"
        )
    for name, held_out in config.eval.sets.items():
        generated = held_out.source.startswith("reasoning-gym:")
        if generated and held_out.source == config.data.source and held_out.seed == config.data.seed:
            faults.append(
                f"eval.sets.{name}.seed = {held_out.seed} is the seed of the training data: the prompts would be the "
                f"same; set eval.sets.{name}.seed to another number"
            )
        if held_out.samples > 1 and held_out.temperature == 0:
            faults.append(
                f"eval.sets.{name}.samples = {held_out.samples} with temperature = 0: greedy responses are all alike; "
                f"set eval.sets.{name}.temperature > 0 or samples = 1"
            )
    if not Path(config.model.path, "config.json").exists():
        faults.append(
            f"model.path = {config.model.path!r} holds no config.json; name a Hugging Face folder, or make one with "
            f"`vime model smollm2 {config.model.path}`"
        )
    return faults


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration, or ConfigError with all its faults."""
    try:
        tree = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; name a TOML file, e.g. examples/demo/config.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no valid TOML: {error}") from None
    for path, value in parse_overrides(overrides):
        apply_override(tree, path, value)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    if faults := impossible(config):
        raise ConfigError("\n".join(faults))
    return config


def dump(config: Config) -> str:
    """The resolved configuration as TOML, every option written out."""
    import tomli_w

    tree = config.model_dump(exclude_none=True)
    if config.reward.parts:  # they stand instead of these
        del tree["reward"]["function"], tree["reward"]["options"]
    return tomli_w.dumps(tree)


def help_text() -> str:
    """All options, a section a paragraph: name, kind, default, explanation."""
    lines, last = [], ""
    for name, field, text in options():
        section = name.rpartition(".")[0]
        if section != last:
            lines.append(f"\n[{section}]" if section else "")
            last = section
        default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
        kind = allowed(field.annotation)
        lines.append(f"  --{name} ({kind}; {default})\n        {' '.join(text.split())}")
    return "\n".join(lines)
