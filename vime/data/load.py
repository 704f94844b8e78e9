"""The data of a run as the configuration names it: training prompts of each source, evaluation sets, and the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from vime.config.data import DataSet, weight_at
from vime.config.sections import Config
from vime.data.cursor import PromptCursor
from vime.data.orders import Band, Epochs, Prompts
from vime.data.own import Endless, Row
from vime.data.sources import content, distinct, each_row, fixed, made_of, open_rows, split_held_out, task_of
from vime.data.streams import TaskStream
from vime.sample import Task

COLUMNS = (
    "prompt_key",
    "answer_key",
    "tools_key",
    "reward_key",
    "generate_key",
    "reward",
    "generate",
    "system",
    "template",
)
Loaded = Sequence[Task] | TaskStream


def reader(section: DataSet) -> partial[Task]:
    """What makes a row's task."""
    return partial(task_of, **fixed(section.source, {column: getattr(section, column) for column in COLUMNS}))


def load_section(section: DataSet) -> list[Task]:
    """All tasks of a section."""
    return each_row(section.source, section.size, section.seed, section.options, reader(section))


def load_training(section: DataSet, name: str, held_out: Sequence[Task]) -> Loaded:
    """The training prompts of a source, without those of evaluation sets; in a mixture ``name`` goes before their ids."""
    make = reader(section)

    def named(own: str, row: Row, where: str) -> Task:
        task = make(own, row, where)
        return replace(task, id=f"{name}/{task.id}", source=name) if name else task

    rows = open_rows(section.source, section.size, section.seed, section.options)
    if isinstance(rows, Endless) and section.size is None:
        return TaskStream(section.source, rows, named, set(map(content, held_out)))
    return split_held_out(made_of(rows, section.source, section.size, named), held_out)


def load_held_out(config: Config) -> dict[str, list[Task]]:
    """The evaluation sets by name, each prompt once."""
    return {name: distinct(load_section(section)) for name, section in config.eval.sets.items()}


def load_data(config: Config) -> tuple[dict[str, Loaded], dict[str, list[Task]]]:
    """Training prompts by source, without any prompt of an evaluation set, and the evaluation sets by name."""
    held_out = load_held_out(config)
    held = [task for tasks in held_out.values() for task in tasks]
    return {name: load_training(section, name, held) for name, section in config.data.members.items()}, held_out


def known_tasks(prompts: Mapping[str, Loaded]) -> list[Task]:
    """The tasks that are known before any is taken: all of a source, of an endless one the next."""
    return [task for one in prompts.values() for task in (one.ahead if isinstance(one, TaskStream) else one)]


def make_cursor(config: Config, prompts: Mapping[str, Loaded]) -> PromptCursor[Task]:
    """The order of the prompts: in each source by its curriculum, of several sources by weight."""
    members, seed = config.data.members, config.run.seed

    def source(name: str, loaded: Loaded) -> Prompts[Task]:
        if isinstance(loaded, TaskStream):
            return loaded
        curriculum = members[name].curriculum
        band = Band(curriculum.low, curriculum.high, curriculum.rest) if curriculum.rest > 1 else None
        return Epochs(loaded, f"{seed}:{name}" if name else seed, band)

    def weight(name: str, step: int) -> float:
        return weight_at(config.data.mixture[name].weight, step) if name else 1.0

    return PromptCursor({name: source(name, loaded) for name, loaded in prompts.items()}, seed, weight)
