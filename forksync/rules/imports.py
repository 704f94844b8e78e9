"""What a Python file imports, and under which names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from forksync.rules.python import Token, tokens


def is_package(path: str) -> bool:
    return re.search(r"(^|/)__init__\.pyi?$", path) is not None


def module_of(path: str, roots: Sequence[str]) -> str:
    """The dotted name of the module in a file: ``src/a/b.py`` under the root ``src`` is ``a.b``; of ``a/__init__.py``, ``a``."""
    for root in sorted(roots, key=len, reverse=True):
        prefix = "" if root in ("", ".") else f"{root.strip('/')}/"
        if path.startswith(prefix):
            path = path[len(prefix) :]
            break
    return re.sub(r"(^|/)__init__\.pyi?$|\.pyi?$", "", path).replace("/", ".")


def package_of(path: str, roots: Sequence[str]) -> list[str]:
    """The parts of the package that a file's relative imports start from."""
    parts = module_of(path, roots).split(".")
    return [part for part in (parts if is_package(path) else parts[:-1]) if part]


def split_dots(written: str) -> tuple[int, str]:
    """``..a`` is (2, "a")."""
    name = re.sub(r"\s", "", written)
    rest = name.lstrip(".")
    return len(name) - len(rest), rest


def absolute(written: str, path: str, roots: Sequence[str]) -> str:
    """The module that ``written`` (``..a`` or ``a.b``) means in the file at ``path``."""
    dots, name = split_dots(written)
    if not dots:
        return name
    package = package_of(path, roots)
    return ".".join([*package[: max(0, len(package) - dots + 1)], *([name] if name else [])])


class Import(NamedTuple):
    """One name that a statement imports: ``import a.b as c`` has no ``module``, ``from ..a import b as c`` has one."""

    module: tuple[int, int] | None
    """Where ``..a`` stands."""
    name: tuple[int, int]
    """Where ``a.b``, or ``b``, stands."""
    alias: str | None
    end: int
    """Where it ends, with its alias."""


class Statement(NamedTuple):
    """An import statement with the names it imports; ``code[start:end]`` is all of it, brackets too."""

    start: int
    end: int
    names: list[Import]


CLOSING = re.compile(r"(?:\s|,|\\\r?\n|#[^\n]*)*\)")


@lru_cache(maxsize=8)
def statements(code: str) -> list[Statement]:
    """The import statements of Python source."""
    found: dict[int, list[Token]] = {}
    for token in tokens(code):
        if token.kind == "imports":
            found.setdefault(token.statement, []).append(token)
    return [made for words in found.values() if (made := statement(code, words)).names]


def statement(code: str, words: list[Token]) -> Statement:
    spelled = [code[word.start : word.end] for word in words]
    start, end, module = words[0].start, words[-1].end, None
    if spelled[0] == "from":
        if "import" not in spelled:
            return Statement(start, end, [])
        split = spelled.index("import")
        inner = code[words[0].end : words[split].start]
        module = (words[0].end + len(inner) - len(inner.lstrip()), words[0].end + len(inner.rstrip()))
        words, spelled = words[split:], spelled[split:]
        if code[words[0].end :].lstrip().startswith("(") and (closing := CLOSING.match(code, end)):
            end = closing.end()
    found: list[Import] = []
    at = 1
    while at < len(words):
        last = at
        while last + 1 < len(words) and code[words[last].end : words[last + 1].start].strip() == ".":
            last += 1
        alias = spelled[last + 2] if last + 2 < len(words) and spelled[last + 1] == "as" else None
        following = last + (3 if alias else 1)
        found.append(Import(module, (words[at].start, words[last].end), alias, words[following - 1].end))
        at = following
    return Statement(start, end, found)


def meaning(code: str, one: Import, path: str, roots: Sequence[str]) -> tuple[str, str]:
    """The name that an import binds and what it stands for: ``("np", "numpy")``, ``("join", "os.path.join")``."""
    name = re.sub(r"\s", "", code[slice(*one.name)])
    if one.module is None:
        top = name.split(".")[0]
        return one.alias or top, name if one.alias else top
    source = absolute(code[slice(*one.module)], path, roots)
    return one.alias or name, f"{source}.{name}" if source else name


def local_names(code: str, path: str, roots: Sequence[str]) -> dict[str, str]:
    """What each imported name of a file means: ``{"np": "numpy", "join": "os.path.join"}``."""
    return dict(meaning(code, one, path, roots) for found in statements(code) for one in found.names)
