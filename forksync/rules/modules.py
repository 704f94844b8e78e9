"""Rules that rename a Python module or package: its file, every import of it, every use of its dotted name."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field

from forksync.rules.imports import Import, absolute, package_of, split_dots, statements
from forksync.rules.names import Renaming, renamings
from forksync.rules.python import Place, tokens
from forksync.rules.rule import Edit, Rule, is_python, splice, unspared

DOTTED = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"


class Module(Rule):
    """A module or package is renamed: files, imports, dotted uses in files that import it; other places by choice."""

    kind: Literal["module"]
    old: str = Field(alias="from", pattern=DOTTED)
    new: str = Field(alias="to", pattern=DOTTED)
    places: tuple[Place, ...] = ("names", "imports", "literals")
    files: bool = True
    """Whether its file or folder moves too. False where another project's module is replaced by a third one's."""
    roots: tuple[str, ...] = ("src", ".")
    """The folders that imports start from."""
    moves: ClassVar[bool] = True

    def renames(self, dotted: str) -> str | None:
        """The new name of a module or of something in it; None if it is not concerned."""
        if dotted == self.old or dotted.startswith(f"{self.old}."):
            return self.new + dotted[len(self.old) :]
        return None

    def move(self, path: str) -> str:
        if not self.files:
            return path
        old, new = self.old.replace(".", "/"), self.new.replace(".", "/")
        for root in self.roots:
            top = "" if root in ("", ".") else f"{root.strip('/')}/"
            if path.startswith(f"{top}{old}/") or path in (f"{top}{old}.py", f"{top}{old}.pyi"):
                return f"{top}{new}{path[len(top) + len(old) :]}"
        return path

    @cached_property
    def _words(self) -> tuple[None, Renaming, Renaming]:
        name = re.escape(self.old)
        return (
            None,
            Renaming(re.compile(rf"{name}((?:[.:]\w+)*)"), rf"{self.new}\1"),
            Renaming(re.compile(rf"(?<![\w.-]){name}(?![\w-])"), self.new),
        )

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        if self.old.rpartition(".")[2] not in text and self.move(path) == path:
            return text, 0, []
        edits, said = list[Edit](), list[str]()
        if is_python(path):
            edits, said = self._in_imports(path, text) if "imports" in self.places else ([], [])
            edits += self._in_code(text) if "names" in self.places else []
        edits += renamings(path, text, [p for p in self.places if p not in ("names", "imports")], *self._words)
        edits = unspared(text, edits, self.spare)
        return splice(text, edits), len(edits), said

    def _in_imports(self, path: str, code: str) -> tuple[list[Edit], list[str]]:
        edits: list[Edit] = []
        said: list[str] = []
        for statement in (found.names for found in statements(code)):
            module = statement[0].module
            if module is None:
                found = [(*name.name, self.renames(code[slice(*name.name)])) for name in statement]
                edits += [(start, end, new) for start, end, new in found if new]
            else:
                made, why = self._in_from(path, code, statement, module)
                edits += made
                said += why
        return edits, said

    def _in_from(
        self, path: str, code: str, statement: list[Import], span: tuple[int, int]
    ) -> tuple[list[Edit], list[str]]:
        """``from module import names``: the module may be the renamed one or lie in it, or a name may be it."""
        written = code[slice(*span)]
        source = absolute(written, path, self.roots)
        target = self.renames(source) or source
        edits: list[Edit] = []
        for name in statement if target == source else []:
            said = code[slice(*name.name)]
            new = self.renames(f"{source}.{said}" if source else said)
            if new is None:
                continue
            package, _, last = new.rpartition(".")
            if package != source and len(statement) > 1:
                why = f"{said} moves from {source} to {package}, but is imported together with others"
                return [], [f"{why}; bring the statement apart with a regex rule before this one"]
            target = package
            if last != said:
                edits.append((*name.name, last if name.alias else f"{last} as {said}"))
        if target != source or (written.startswith(".") and self.move(path) != path):
            new = self._written(path, written, target)
            edits += [(*span, new)] if new != written else []
        return edits, []

    def _written(self, path: str, written: str, target: str) -> str:
        """How the file, itself perhaps moved, names ``target``: relative if it was and still can be."""
        dots, _ = split_dots(written)
        package = package_of(self.move(path), self.roots)
        base = package[: max(0, len(package) - dots + 1)]
        parts = target.split(".") if target else []
        return "." * dots + ".".join(parts[len(base) :]) if dots and parts[: len(base)] == base else target

    def _in_code(self, code: str) -> list[Edit]:
        """Dotted uses, in a file that imports the name they begin with."""
        old = self.old.split(".")
        imported = [
            code[slice(*one.name)]
            for found in statements(code)
            for one in found.names
            if not one.module and not one.alias
        ]
        if old[0] not in {name.split(".")[0] for name in imported}:
            return []
        edits: list[Edit] = []
        found = [token for token in tokens(code) if token.kind in ("names", "attributes")]
        for at, token in enumerate(found):
            chain = found[at : at + len(old)]
            if (
                token.kind == "names"
                and [code[part.start : part.end] for part in chain] == old
                and all(part.kind == "attributes" for part in chain[1:])
                and all(code[a.end : b.start].strip() == "." for a, b in pairwise(chain))
            ):
                edits.append((token.start, chain[-1].end, self.new))
        return edits


class Package(Module):
    """A top-level package under a new name, everywhere: as ``module``, and as a word in strings, comments and other files."""

    kind: Literal["package"]  # type: ignore[assignment]
    old: str = Field(alias="from", pattern=r"^[^\W\d]\w*$")
    places: tuple[Place, ...] = ("names", "imports", "literals", "strings", "comments", "text")
