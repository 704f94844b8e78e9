"""Tasks from generated sources, files and data-set folders. Heavy libraries are imported where they are used."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from vime.config.nearest import nearest
from vime.data import DataError
from vime.data.own import Endless, own_rows, taken
from vime.sample import Task

GENERATED = {
    "reasoning-gym": "vime.envs.reasoning_gym",
    "verifiers": "vime.envs.verifiers",
    "openenv": "vime.envs.openenv",
}
"""By what stands before the ``:`` of a source, the module whose ``rows(name, size, seed, options)`` it is. The columns of such
rows have fixed names."""


def load_tasks(
    source: str, *, size: int | None = None, seed: int = 0, options: dict[str, Any] | None = None, **columns: Any
) -> list[Task]:
    """All tasks of a source, in its order; ``columns`` as of ``task_of``. Raises DataError."""
    return each_row(source, size, seed, options or {}, partial(task_of, **fixed(source, columns)))


def fixed(source: str, columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a source, whose names are fixed where it is generated."""
    if source.partition(":")[0] not in GENERATED:
        return columns
    return columns | {f"{column}_key": column for column in ("prompt", "answer", "tools", "generate")}


def task_of(
    name: str,
    row: dict[str, Any],
    where: str,
    *,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    tools_key: str = "tools",
    reward_key: str | None = None,
    generate_key: str | None = None,
    reward: str | None = None,
    generate: str | None = None,
    system: str | None = None,
    template: str | None = None,
) -> Task:
    """A row's task. Its prompt is text or a list of chat messages; columns that have no other meaning become metadata.
    ``template`` is a format string around a text prompt and may name any column. Raises DataError."""
    messages = prompt_messages(row, prompt_key, system, template, where)
    answer = row.get(answer_key)
    taken = (prompt_key, answer_key, tools_key, reward_key, generate_key, "id")
    return Task(
        name,
        messages,
        None if answer is None else str(answer),
        plain({key: value for key, value in row.items() if key not in taken}, where),
        tuple(tools_of(row, tools_key, where)),
        named_in(row, reward_key, where) or reward,
        named_in(row, generate_key, where) or generate,
    )


def open_rows(source: str, size: int | None, seed: int, options: dict[str, Any]) -> Iterable[dict[str, Any]] | Endless:
    """The rows of a source; of an endless one the source itself."""
    kind, _, name = source.partition(":")
    if kind in GENERATED:
        rows: Iterable[dict[str, Any]] = import_module(GENERATED[kind]).rows(name, size, seed, options)
        return rows
    if source.rpartition(":")[2].isidentifier() and ":" in source and not Path(source).exists():
        return own_rows(source, options)
    return file_rows(Path(source), options)


def each_row(
    source: str,
    size: int | None,
    seed: int,
    options: dict[str, Any],
    make: Callable[[str, dict[str, Any], str], Task],
) -> list[Task]:
    """``make(id, row, where)`` of each row of a source, in its order; ids are the rows' own or tell their place."""
    return made_of(open_rows(source, size, seed, options), source, size, make)


def made_of(
    rows: Iterable[dict[str, Any]] | Endless,
    source: str,
    size: int | None,
    make: Callable[[str, dict[str, Any], str], Task],
) -> list[Task]:
    """As ``each_row``, of rows that are open."""
    if isinstance(rows, Endless):
        if size is None:
            raise DataError(f"{source} is endless and needs a size here; set it")
        rows = taken(rows, source, size)
    kind, _, name = source.partition(":")
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(islice(rows, size)):
        own = row_id(row, name if kind in GENERATED else source, index)
        if own in seen:
            raise DataError(f"{source}: rows {seen[own]} and {index} have the same id {own!r}; make ids unique")
        seen[own] = index
        tasks.append(make(own, row, f"{source}, row {index}"))
    if not tasks:
        raise DataError(f"{source} holds no rows")
    return tasks


def row_id(row: dict[str, Any], name: str, index: int) -> str:
    return f"{name}/{index}" if row.get("id") is None else str(row["id"])


def named_in(row: dict[str, Any], key: str | None, where: str) -> str | None:
    """The function that a column names, None where it names none."""
    value = None if key is None else row.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} is no function's name: {value!r:.80}; it is text, a built-in or module:function"
        )
    return value or None


def tools_of(row: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A column's tool definitions in the OpenAI form; none where it has no value."""
    tools = given_tools(row, key, where)
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise DataError(
                f"{where}: tool {number} of {key!r} is not of the form {{type: function, function: {{name, description, "
                f"parameters}}}}: {tool!r:.80}"
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise DataError(f"{where}: tool {function['name']!r} of {key!r}: parameters is no JSON schema, an object")
    return tools


def given_tools(row: dict[str, Any], key: str, where: str) -> list[Any]:
    """A column's list of tools, which may be JSON text."""
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: {key!r} is no JSON: {error}") from None
    if value and not isinstance(value, list):
        raise DataError(f"{where}: {key!r} is no list of tools: {value!r:.80}")
    return list(without_nulls(value)) if value else []


def without_nulls(value: Any) -> Any:
    """Without keys whose value is null: Arrow gives every message all the keys that any has."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def prompt_messages(
    row: dict[str, Any], prompt_key: str, system: str | None, template: str | None, where: str
) -> tuple[dict[str, Any], ...]:
    """The messages of a row's prompt, text or a list of messages, with template and system message put in."""
    if prompt_key not in row:
        raise DataError(f"{where}: no column {prompt_key!r}{nearest(prompt_key, list(row))}")
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": fill(template, prompt, row, where)}]
    elif is_messages(prompt):
        if template:
            raise DataError(
                f"{where}: a template wraps text, but {prompt_key!r} is a list of messages; remove the template"
            )
        messages = without_nulls(prompt)
    else:
        raise DataError(f"{where}: {prompt_key!r} is neither text nor a list of messages: {prompt!r:.80}")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


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


def fill(template: str | None, prompt: str, row: dict[str, Any], where: str) -> str:
    """``template`` with {prompt} and the row's columns put in."""
    if template is None:
        return prompt
    columns = {**row, "prompt": prompt}
    try:
        for _, name, _, _ in string.Formatter().parse(template):
            if name is not None and name.split(".")[0].split("[")[0] not in columns:
                hint = nearest(name, list(columns))
                raise DataError(f"{where}: the template names {{{name}}}, which the rows do not have{hint}")
        return template.format(**columns)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: the template {template!r} cannot be filled: {error}; a literal brace is doubled"
        ) from None


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


def content(task: Task) -> str:
    """What makes two prompts the same: the messages, and, of an environment, what it is reset with."""
    return json.dumps([task.messages, task.metadata.get("episode")], sort_keys=True)


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """The tasks without those whose prompt came before: a generated set repeats itself."""
    return list({content(task): task for task in reversed(tasks)}.values())[::-1]


def split_held_out(train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """The training tasks whose prompts are in no evaluation set; DataError where none is left."""
    held = set(map(content, held_out))
    kept = [task for task in train if content(task) not in held]
    if not kept:
        raise DataError(f"all {len(train)} training prompts are evaluation prompts too; use other data or another seed")
    return kept
