"""Where prompts come from: one source or a mixture of several, what is in a row, and in which order rows come."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from vime.config.base import Fraction, NonNegative, Positive, Section

if TYPE_CHECKING:
    from vime.config.sections import Config

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ENVIRONMENTS = ("verifiers", "openenv")
"""sources before whose ``:`` one of these stands bring their own generate function and reward"""


class Source(Section):
    """Rows and the prompt in each."""

    source: str
    """`reasoning-gym:NAME`, a .jsonl, .json or .parquet file, or a folder that `datasets` can load; or your own class,
    `package.module:Class` or `file.py:Class`"""
    size: Positive | None = None
    """number of prompts; needed by generated sources, cuts the others"""
    seed: NonNegative = 0
    """seed of a generated source; train and evaluation must differ"""
    options: dict[str, Any] = {}
    """options of a generated source or of your own class, by its own names; `split` for what `datasets` loads"""
    prompt_key: str = "prompt"
    """column with the prompt: text, or a list of chat messages"""
    system: str | None = None
    """system message put before prompts that have none"""
    template: str | None = None
    """format string around a text prompt, e.g. `"{prompt} Reply with a number."`"""


class DataSet(Source):
    """Where prompts come from, and what is done with each. `source` may also be an environment."""

    answer_key: str = "answer"
    """column with the reference answer, where there is one"""
    tools_key: str = "tools"
    """column with the tools that the chat template is given, where there is one: a list of definitions in the OpenAI form, or
    JSON text"""
    reward: str | None = None
    """what scores the responses to these rows, as reward.function; default: the run's reward"""
    reward_key: str | None = None
    """column that names the reward of a row; rows without a value have `reward`"""
    generate: str | None = None
    """what makes the responses to these rows, as rollout.generate; default: the run's"""
    generate_key: str | None = None
    """column that names the generate function of a row; rows without a value have `generate`"""


class Curriculum(Section):
    """Prompts of the right difficulty more often: those that pass too rarely or too often rest for some epochs."""

    rest: Positive = 1
    """a prompt that is outside the band comes in every so manieth epoch only; 1: all come in each"""
    low: Fraction = 0.2
    """the band: a prompt rests when less than this share of its last group's responses passed (eval.pass_reward)"""
    high: Fraction = 0.8
    """or more than this share"""


class Member(DataSet):
    """One source of a mixture."""

    weight: Weight | list[tuple[NonNegative, Weight]] = 1.0
    """its share of the prompts, relative to the others'; or points `[[step, weight], ...]` with straight lines between them"""
    curriculum: Curriculum = Curriculum()


class TrainingData(DataSet):
    """Where prompts come from, and what is done with each; one source, or `[data.mixture.NAME]` sections."""

    source: str = ""
    """`reasoning-gym:NAME`, a .jsonl, .json or .parquet file, or a folder that `datasets` can load; your own class,
    `package.module:Class` or `file.py:Class`; or an environment, `verifiers:ID` or `openenv:URL` (docs/environments.md)"""
    response_keys: list[str] = []
    """for dpo: the columns with the chosen and the rejected response; then none are sampled"""
    curriculum: Curriculum = Curriculum()
    mixture: dict[str, Member] = {}
    """instead of source: several, each a section of its own: `[data.mixture.NAME]`"""

    @property
    def members(self) -> Mapping[str, Member | TrainingData]:
        """The sources by name; one alone has the name ""."""
        return self.mixture or {"": self}


class EvalSet(DataSet):
    """A held-out set and how it is sampled."""

    samples: Positive = 1
    """responses a prompt; k of pass@k"""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the probability that is sampled from, its likeliest tokens"""
    top_k: Annotated[int, Field(ge=0)] = 0
    """number of likeliest tokens that are sampled from; 0: all"""
    max_tokens: Positive | None = None
    """response tokens at most; default: rollout.max_tokens"""
    every: NonNegative | None = None
    """steps between its evaluations; default: eval.every"""


def points(weight: float | list[tuple[int, float]]) -> list[tuple[int, float]]:
    """A weight as (step, weight) points."""
    return weight if isinstance(weight, list) else [(0, weight)]


def impossible_data(config: Config) -> list[str]:
    """One line a fault."""
    data, faults = config.data, []
    if data.mixture:
        faults += impossible_mixture(data)
    elif not data.source:
        faults.append("data.source is missing; set it in the file or with --data.source VALUE")
    sections: dict[str, DataSet] = {f"data{name and f'.mixture.{name}'}": one for name, one in data.members.items()}
    sections |= {f"eval.sets.{name}": one for name, one in config.eval.sets.items()}
    for place, one in sections.items():
        for option in ("reward", "reward_key", "generate", "generate_key"):
            if one.source.partition(":")[0] in ENVIRONMENTS and getattr(one, option) is not None:
                faults.append(
                    f"{place}.{option} = {getattr(one, option)!r}: {one.source} brings its own reward and generate function; "
                    "remove it"
                )
        if isinstance(one, Member | TrainingData) and one.curriculum.low > one.curriculum.high:
            faults.append(
                f"{place}.curriculum.low = {one.curriculum.low} is over high = {one.curriculum.high}: no prompt would be in "
                "the band; swap them"
            )
    return faults


def impossible_mixture(data: TrainingData) -> list[str]:
    faults = [
        f"data.{option} is set beside data.mixture; set it in each section that needs it, as data.mixture.NAME.{option}"
        for option in [*DataSet.model_fields, "curriculum"]
        if option in data.model_fields_set
    ]
    for name, member in data.mixture.items():
        if "/" in name:
            faults.append(f"data.mixture.{name}: a name becomes part of metrics and of ids; leave out the '/'")
        steps = [step for step, _ in points(member.weight)]
        if not steps or any(later <= step for step, later in pairwise(steps)):
            faults.append(
                f"data.mixture.{name}.weight = {member.weight}: the steps of its points must rise; write [[0, 1.0], [50, 0.2]]"
            )
    if not faults:
        for step in sorted({step for member in data.mixture.values() for step, _ in points(member.weight)}):
            if not any(weight_at(member.weight, step) for member in data.mixture.values()):
                faults.append(f"data.mixture: at step {step} all weights are 0; give one of them more")
                break
    return faults


def weight_at(weight: float | list[tuple[int, float]], step: int) -> float:
    """The weight in a step: on the straight line between the points around it, before the first and after the last theirs."""
    line = points(weight)
    for (start, before), (end, after) in pairwise(line):
        if start <= step < end:
            return before + (after - before) * (step - start) / (end - start)
    return line[0][1] if step < line[0][0] else line[-1][1]
