"""From a TOML file and ``--section.key value`` overrides to a checked Config.

Everything wrong is said at once, each with the key, the value and the fix, before anything starts.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vime.config.algorithms import impossible_algorithms
from vime.config.data import Source, impossible_data
from vime.config.kernels import kernel_faults
from vime.config.lora import impossible_lora
from vime.config.memory import impossible_memory
from vime.config.nearest import nearest
from vime.config.rewards import impossible_rewards
from vime.config.sections import Config
from vime.config.slime import impossible_slime
from vime.config.supervised import Supervised

Kind = TypeVar("Kind", Config, Supervised)


class ConfigError(Exception):
    """The configuration cannot be run; the message has one line a fault."""


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The Section class in an annotation such as ``Run`` or ``dict[str, EvalSet]``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def options(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
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


def keys_at(location: tuple[Any, ...], kind: type[BaseModel]) -> list[str]:
    """The keys known in the section of ``kind`` that ``location`` names."""
    model: type[BaseModel] | None = kind
    for part in location:
        if model is None:
            return []
        field = model.model_fields.get(str(part))
        model = section_class(field.annotation) if field else model
    return list(model.model_fields) if model else []


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"{key} is not an option{nearest(str(fault['loc'][-1]), keys_at(fault['loc'][:-1], kind))}")
        elif fault["type"] == "missing":
            lines.append(f"{key} is missing; set it in the file or with --{key} VALUE")
        else:
            lines.append(f"{key} = {json.dumps(fault['input'], default=str)}: {fault['msg'].lower()}")
    return "\n".join(dict.fromkeys(lines))


def impossible(config: Config) -> list[str]:
    """Combinations that cannot work, each with its fix."""
    rollout, algorithm, faults = config.rollout, config.algorithm, impossible_algorithms(config)
    faults += impossible_data(config) + impossible_rewards(config) + impossible_lora(config) + impossible_memory(config)
    faults += kernel_faults(config, config.trainer.device) + impossible_slime(config)
    if rollout.top_p != 1.0 or rollout.top_k != -1:
        faults.append(
            f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: the server would renormalise over the "
            "kept tokens and the trainer would not; set top_p = 1.0 and top_k = -1"
        )
    if config.run.deterministic:
        faults += impossible_deterministic(config)
    if rollout.groups % algorithm.updates:
        faults.append(
            f"algorithm.updates = {algorithm.updates} does not divide rollout.groups = {rollout.groups}; "
            "set groups to a multiple of it"
        )
    for name, held_out in config.eval.sets.items():
        if held_out.samples > 1 and held_out.temperature == 0:
            faults.append(
                f"eval.sets.{name}.samples = {held_out.samples} with temperature = 0: greedy responses are all alike; "
                f"set eval.sets.{name}.temperature > 0 or samples = 1"
            )
    return [*faults, *impossible_anywhere(config)]


def impossible_deterministic(config: Config) -> list[str]:
    needs = {
        f"rollout.max_staleness = {config.rollout.max_staleness}": (config.rollout.max_staleness == 0, "set it to 0"),
        f"inference.servers = {config.inference.servers}": (config.inference.servers == 1, "set it to 1"),
        f"inference.urls = {config.inference.urls}": (not config.inference.urls, "let the run start its own server"),
        f'lora.sync = "{config.lora.sync}"': (not config.lora.by_adapter, 'set it to "merged"'),
        "eval.background = true": (not config.eval.background, "set it to false"),
    }
    return [f"run.deterministic with {what}: {fix}" for what, (fine, fix) in needs.items() if not fine]


def impossible_anywhere(config: Config | Supervised) -> list[str]:
    """The same of what all commands have: model, data, trainer."""
    faults, model, trainer = [], config.model.path, config.trainer
    data: Mapping[str, Source] = config.data.members if isinstance(config, Config) else {"": config.data}
    sets: Mapping[str, Source] = config.eval.sets
    parts = trainer.replicas * trainer.context_parallel * trainer.tensor_parallel
    if trainer.ranks % parts:
        faults.append(
            f"trainer.ranks = {trainer.ranks} is no multiple of replicas x context_parallel x tensor_parallel = "
            f"{trainer.replicas} x {trainer.context_parallel} x {trainer.tensor_parallel} = {parts}; "
            f"set it to a multiple of {parts}"
        )
    for name, held_out in sets.items():
        generated = held_out.source.startswith("reasoning-gym:")
        if generated and any(held_out.source == one.source and held_out.seed == one.seed for one in data.values()):
            faults.append(
                f"eval.sets.{name}.seed = {held_out.seed} is the seed of the training data: the prompts would be the "
                f"same; set eval.sets.{name}.seed to another number"
            )
    if not Path(model, "config.json").exists():
        faults.append(
            f"model.path = {model!r} holds no config.json; name a Hugging Face folder, or make one with "
            f"`vime model smollm2 {model}`"
        )
    return faults


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration, or ConfigError with all its faults."""
    config = read(file, overrides, Config)
    if faults := impossible(config):
        raise ConfigError("\n".join(faults))
    return config


def load_supervised(file: Path, overrides: Sequence[str], pairs: bool) -> Supervised:
    """The checked configuration of ``vime sft`` or, with ``pairs``, ``vime reward-model``."""
    config = read(file, overrides, Supervised)
    faults = impossible_anywhere(config) + impossible_lora(config.engine("sft"))
    if pairs and config.lora.rank:
        faults.append(f"lora.rank = {config.lora.rank}: a reward model is trained whole; remove [lora]")
    if pairs and config.batch.reduction != "token":
        faults.append(
            f"batch.reduction = {config.batch.reduction!r}: a reward model's loss is the mean over pairs; remove it"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def read(file: Path, overrides: Sequence[str], kind: type[Kind]) -> Kind:
    """The configuration with all its values of the right kind."""
    try:
        tree = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; name a TOML file, e.g. examples/demo/config.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no valid TOML: {error}") from None
    for path, value in parse_overrides(overrides):
        apply_override(tree, path, value)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from None


def dump(config: Config | Supervised) -> str:
    """The resolved configuration as TOML, every option written out."""
    import tomli_w

    tree = config.model_dump(exclude_none=True)
    if isinstance(config, Config) and (
        config.reward.parts or config.slime.custom_rm_path
    ):  # they stand instead of these
        del tree["reward"]["function"], tree["reward"]["options"], tree["reward"]["group"]
    if isinstance(config, Config) and config.data.mixture:
        tree["data"] = {name: tree["data"][name] for name in ("response_keys", "mixture")}
    return tomli_w.dumps(tree)


def help_text(model: type[BaseModel]) -> str:
    """All options of a configuration, a section a paragraph: name, kind, default, explanation."""
    lines, last = [], ""
    for name, field, text in options(model):
        section = name.rpartition(".")[0]
        if section != last:
            lines.append(f"\n[{section}]" if section else "")
            last = section
        default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
        kind = allowed(field.annotation)
        lines.append(f"  --{name} ({kind}; {default})\n        {' '.join(text.split())}")
    return "\n".join(lines)
