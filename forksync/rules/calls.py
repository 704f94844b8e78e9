"""The rule that rewrites calls: a signature on the left, an expression of its parameters on the right."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

import libcst as cst
from pydantic import Field, PrivateAttr, model_validator

from forksync.git import decode, encode
from forksync.rules.import_edits import add, remove_unused, written
from forksync.rules.imports import local_names, module_of
from forksync.rules.rewriter import RECEIVER, Rewriter, names_in, parse_expression
from forksync.rules.rule import Rule, compiled, is_python
from forksync.rules.signature import Signature, parse_signature


class Call(Rule):
    """``from = "a.b.f(x, y=None, *rest)"``, ``to = "g(y, key=x, *rest)"``.

    ``from`` is written as a signature. A parameter with a default may be missing from a call; it is then missing from the
    result, or has its default where the result needs one. ``a.b.f`` is found under whatever name a file imports it.
    ``$self.f(x)`` is a method of any receiver, ``await f(x)`` an awaited call. A call that does not fit, or that gives an
    argument which ``to`` does not use and ``drops`` does not list, is left alone and warned of; so is a use of the
    function that is no call.
    """

    kind: Literal["call"]
    old: str = Field(alias="from")
    new: str = Field(alias="to")
    drops: tuple[str, ...] = ()
    """Parameters whose arguments may be lost."""
    receiver: str = ".*"
    """A regular expression for the whole source of the receiver, with ``$self.f``."""
    imports: tuple[str, ...] = ()
    """Import statements that the result needs; added where a file lacks them."""
    unused: tuple[str, ...] = ()
    """Import statements that are removed from a rewritten file which uses what they import no longer."""
    roots: tuple[str, ...] = ("src", ".")
    """The folders that imports start from."""
    _signature: Signature = PrivateAttr()
    _template: cst.BaseExpression = PrivateAttr()

    @model_validator(mode="after")
    def _fits(self) -> Call:
        compiled(self.receiver)
        if self.spare:
            raise ValueError("a call rule spares nothing by text; narrow from, or scope it with not_paths")
        self._signature = parse_signature(self.old)
        self._template = parse_expression(re.sub(r"\$(\w+)", rf"{RECEIVER}\1", self.new))
        for statement in (*self.imports, *self.unused):
            written(statement)
        known = {p.name for p in self._signature.parameters}
        if unknown := [name for name in self.drops if name not in known]:
            raise ValueError(f"drops has {unknown[0]}, which is no parameter of from")
        used = names_in(self._template)
        lost = [p.name for p in self._signature.parameters if p.required and p.name not in used | set(self.drops)]
        if lost:
            raise ValueError(f"to does not use {', '.join(lost)}, which every call gives; use it, or list it in drops")
        if unbound := [
            name for name in used if name.startswith(RECEIVER) and name != f"{RECEIVER}{self._signature.receiver}"
        ]:
            raise ValueError(f"to uses ${unbound[0].removeprefix(RECEIVER)}, which from does not have")
        return self

    @cached_property
    def _hint(self) -> re.Pattern[str]:
        return re.compile(rf"\b{re.escape(self._signature.function.rpartition('.')[2])}\b")

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        if not is_python(path) or not self._may_stand_in(path, text):
            return text, 0, []
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        code = text.removeprefix(mark)
        changed, uses, said = self._in_code(path, code) if is_unicode(code) else self._in_bytes(path, code)
        return mark + changed, uses, said

    def _may_stand_in(self, path: str, text: str) -> bool:
        """Whether the function can be named in the file at all: to read it as Python takes its time."""
        if not self._hint.search(text):
            return False
        function = self._signature.function
        if self._signature.receiver is not None or "." not in function:
            return True
        if module_of(path, self.roots) == function.rpartition(".")[0]:
            return True
        known = local_names(text, path, self.roots).items()
        rests = [
            (local, function.removeprefix(meant)) for local, meant in known if f"{function}.".startswith(f"{meant}.")
        ]
        return any(re.search(rf"\b{local}{spelled(rest)}\b", text) for local, rest in rests)

    def _in_bytes(self, path: str, text: str) -> tuple[str, int, list[str]]:
        """libcst takes Unicode only: other bytes pass through it one character each, which leaves all ASCII as it is."""
        code, uses, said = self._in_code(path, encode(text).decode("latin-1"))
        return decode(code.encode("latin-1")), uses, said

    def _in_code(self, path: str, code: str) -> tuple[str, int, list[str]]:
        try:
            module = cst.parse_module(code)
        except cst.ParserSyntaxError as fault:
            return code, 0, [f"line {fault.raw_line} is not read as Python, so no call was looked for"]
        names = local_names(code, path, self.roots)
        rewriter = Rewriter(
            self._signature, self._template, self.drops, self.receiver, names, module_of(path, self.roots)
        )
        changed = module.visit(rewriter)
        if not rewriter.uses:
            return code, 0, rewriter.said
        code = changed.code
        for statement in self.imports:
            code = add(code, statement)
        for statement in self.unused:
            code = remove_unused(code, statement)
        return code, rewriter.uses, rewriter.said


def spelled(rest: str) -> str:
    """A pattern of ``.b.c`` as code may have it, with blanks around the dots."""
    return "".join(rf"\s*\.\s*{part}" for part in rest.split(".") if part)


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
