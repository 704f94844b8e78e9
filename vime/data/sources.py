"""Tasks from generated sources, files and data-set folders. Heavy libraries are imported where they are used."""

from __future__ import annotations

import json
import string
import warnings
from collections.abc import Iterable, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from vime.config.nearest import nearest
from vime.sample import Task

GENERATED = "reasoning-gym:"


class DataError(Exception):
    """The data cannot be used; the message names the source, the place and the fix."""


def load_tasks(
    source: str,
    *,
    size: int | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    system: str | None = None,
    template: str | None = None,
) -> list[Task]:
    """All tasks of a source, in its order.

    ``source``: ``reasoning-gym:NAME``, a .jsonl, .json or .parquet file, or a folder for ``datasets``. A row's prompt
    is text or a list of chat messages; columns other than prompt, answer and id become metadata. ``template`` is a
    format string around a text prompt and may name any column. Raises DataError.
    """
    if source.startswith(GENERATED):
        name = source.removeprefix(GENERATED)
        rows: Iterable[dict[str, Any]] = generated_rows(name, size, seed, options or {})
        prompt_key, answer_key = "prompt", "answer"
    else:
        name = source
        rows = file_rows(Path(source), options or {})
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(islice(rows, size)):
        task = make_task(f"{name}/{index}", index, row, prompt_key, answer_key, system, template, source)
        if task.id in seen:
            raise DataError(f"{source}: rows {seen[task.id]} and {index} have the same id {task.id!r}; make ids unique")
        seen[task.id] = index
        tasks.append(task)
    if not tasks:
        raise DataError(f"{source} holds no rows")
    return tasks


def make_task(
    default_id: str,
    index: int,
    row: dict[str, Any],
    prompt_key: str,
    answer_key: str,
    system: str | None,
    template: str | None,
    source: str,
) -> Task:
    if prompt_key not in row:
        raise DataError(f"{source}, row {index}: no column {prompt_key!r}{nearest(prompt_key, list(row))}")
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": fill(template, prompt, row, source)}]
    elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        if template:
            raise DataError(
                f"{source}, row {index}: a template wraps text, but {prompt_key!r} is a list of messages; "
                "remove the template"
            )
        messages = [dict(message) for message in prompt]
    else:
        raise DataError(f"{source}, row {index}: {prompt_key!r} is neither text nor a list of messages: {prompt!r:.80}")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    answer = row.get(answer_key)
    metadata = {key: value for key, value in row.items() if key not in (prompt_key, answer_key, "id")}
    name = default_id if row.get("id") is None else str(row["id"])
    where = f"{source}, row {index}"
    return Task(name, tuple(messages), None if answer is None else str(answer), plain(metadata, where))


def plain(metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """Metadata as JSON has it: dates and decimals become text, other values that JSON lacks are refused by column."""
    kept = {}
    for column, value in metadata.items():
        try:
            kept[column] = json.loads(json.dumps(value, default=_text))
        except TypeError as error:
            raise DataError(f"{where}: column {column!r} cannot be metadata, {error}; remove the column") from None
    return kept


def _text(value: Any) -> str:
    if isinstance(value, (date, time, timedelta, Decimal)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def fill(template: str | None, prompt: str, row: dict[str, Any], source: str) -> str:
    """``template`` with {prompt} and the row's columns put in."""
    if template is None:
        return prompt
    columns = {**row, "prompt": prompt}
    try:
        for _, name, _, _ in string.Formatter().parse(template):
            if name is not None and name.split(".")[0].split("[")[0] not in columns:
                hint = nearest(name, list(columns))
                raise DataError(f"{source}: the template names {{{name}}}, which the rows do not have{hint}")
        return template.format(**columns)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{source}: the template {template!r} cannot be filled: {error}; a literal brace is doubled"
        ) from None


def generated_rows(name: str, size: int | None, seed: int, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Rows of a reasoning-gym data set; ``entry`` is kept for its own scorer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package it imports, when that is first compiled
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {name!r}{_close(name, list(DATASETS))}")
    if size is None:
        raise DataError(f"{GENERATED}{name} is generated and needs a size; set data.size (or the evaluation set's)")
    known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")]
    for option in options:
        if option not in known:
            raise DataError(f"{GENERATED}{name} has no option {option!r}{nearest(option, known)}")
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{GENERATED}{name} refuses its options {options}: {error}") from None
    for entry in dataset:
        kept = json.loads(json.dumps({"answer": entry["answer"], "metadata": entry["metadata"]}, default=str))
        yield {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": name, "entry": kept}


def _close(name: str, known: list[str]) -> str:
    hint = nearest(name, known)
    return (
        hint
        if "did you mean" in hint
        else f"; it has {len(known)}, see `python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)'`"
    )


def file_rows(path: Path, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Rows of a file or a data-set folder."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist; a source is reasoning-gym:NAME, a .jsonl or .parquet file, or a folder"
        )
    if path.suffix == ".jsonl":
        known: list[str] = []
        rows = json_lines(path)
    elif path.is_dir() or path.suffix in (".parquet", ".json"):
        known, rows = ["split"], dataset_rows(path, options)
    else:
        raise DataError(f"{path}: files end in .jsonl, .json or .parquet, not {path.suffix or 'nothing'!r}")
    if unknown := [option for option in options if option not in known]:
        raise DataError(
            f"{path} takes no option {unknown[0]!r}; {'options are ' + ', '.join(known) if known else 'remove it'}"
        )
    return rows


def json_lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: {error.msg}; each line is one JSON object") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number} is not UTF-8: {error.reason}; save the file as UTF-8") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: each line is one JSON object, this is a {type(row).__name__}")
            yield row


def dataset_rows(path: Path, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Through ``datasets``: a saved data set, or a file or folder it can load; option ``split``, default train."""
    import datasets

    split = options.get("split", "train")
    datasets.disable_progress_bars()
    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(str(path))
            if not isinstance(loaded, datasets.DatasetDict):
                return loaded
            if split not in loaded:
                raise LookupError(f"there is no such split{nearest(split, list(loaded))}")
            return loaded[split]
        if path.is_file():
            return datasets.load_dataset(path.suffix[1:], data_files=str(path), split=split)
        return datasets.load_dataset(str(path), split=split)
    except Exception as error:
        place = json_fault(path) if path.suffix == ".json" else ""
        cause = error.__cause__ or error  # datasets wraps what says more
        raise DataError(f"{path}{place} cannot be loaded by datasets (split {split!r}): {cause}") from None


def json_fault(path: Path) -> str:
    """``", line N"`` where a .json file, an array or one object a line, stops being JSON; "" where it does not."""
    try:
        json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line: DataError names the line
            list(json_lines(path))
            return ""
        return f", line {error.lineno},"
    except UnicodeDecodeError:
        return ", which is not UTF-8,"
    return ""


def _content(task: Task) -> str:
    return json.dumps(task.messages, sort_keys=True)


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """The tasks without those whose messages came before: a generated set repeats itself."""
    return list({_content(task): task for task in reversed(tasks)}.values())[::-1]


def split_held_out(train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """The training tasks whose messages are in no evaluation set; DataError where none is left."""
    held = set(map(_content, held_out))
    kept = [task for task in train if _content(task) not in held]
    if not kept:
        raise DataError(f"all {len(train)} training prompts are evaluation prompts too; use other data or another seed")
    return kept
