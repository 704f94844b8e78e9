"""Import statements put into a file, and taken out where nothing uses them any more."""

from __future__ import annotations

import re

from forksync.rules.imports import Statement, statements
from forksync.rules.python import Token, tokens
from forksync.rules.rule import splice


def bindings(code: str) -> list[tuple[Statement, int, str, str]]:
    """Each imported name: its statement, its place in that, and module and name as they are written."""
    return [
        (
            found,
            place,
            code[slice(*one.module)] if one.module else "",
            code[slice(*one.name)] + (f" as {one.alias}" if one.alias else ""),
        )
        for found in statements(code)
        for place, one in enumerate(found.names)
    ]


def written(statement: str) -> tuple[str, str]:
    """(module, name) of an import statement of one name. ValueError for any other text."""
    found = bindings(statement)
    if len(found) != 1 or not re.fullmatch(r"(import|from)\s.*", statement):
        raise ValueError(f"{statement!r} is no import statement of one name")
    return found[0][2:]


def at_margin(code: str, found: Statement) -> bool:
    """Whether the statement begins its line: one in a function or a block is not the whole file's."""
    return found.start == 0 or code[found.start - 1] == "\n"


def line_end(code: str, at: int) -> int:
    """Past the end of the line, or of the text."""
    return found + 1 if (found := code.find("\n", at)) >= 0 else len(code)


def add(code: str, statement: str) -> str:
    """The file with the import, among its first ones and beside those of the same package; as it is if it has it."""
    module, name = written(statement)
    if any((module, name) == found[2:] and at_margin(code, found[0]) for found in bindings(code)):
        return code
    ending = "\r\n" if "\r\n" in code else "\n"
    block = leading(code)
    if not block:
        at = after_docstring(code)
        return f"{code[:at]}{statement}{ending}{ending if code[at:].strip() else ''}{code[at:]}"
    top = (module or name).split(".")[0]
    alike = [found for found in block if (first_module(code, found)).split(".")[0] == top]
    later = [found for found in alike if first_module(code, found) > (module or name)]
    at = later[0].start if later else line_end(code, (alike or block)[-1].end)
    before = "" if at == 0 or code[at - 1] == "\n" else ending
    return f"{code[:at]}{before}{statement}{ending}{code[at:]}"


def first_module(code: str, found: Statement) -> str:
    one = found.names[0]
    return code[slice(*(one.module or one.name))]


def leading(code: str) -> list[Statement]:
    """The imports at the left margin that stand before everything else but strings and comments."""
    first = re.search(r"^(?:def|class|async|@)", code, re.MULTILINE)
    end = first.start() if first else len(code)
    return [found for found in statements(code) if found.start < end and at_margin(code, found)]


def after_docstring(code: str) -> int:
    """Where the first statement may stand: past comments and the module's docstring."""
    at = 0
    for token in tokens(code):
        if token.kind == "comments" and not code[at : token.start].strip():
            at = line_end(code, token.end)
        elif token.kind == "strings" and re.fullmatch(r"\s*[rRuU]?(\"{3}|'{3}|\"|')", code[at : token.start]):
            return line_end(code, token.end)
        else:
            break
    return at


def remove_unused(code: str, statement: str) -> str:
    """The file without the import, if it is at the left margin and nothing uses what it imports."""
    module, name = written(statement)
    for found, place, its_module, its_name in bindings(code):
        if (its_module, its_name) != (module, name) or not at_margin(code, found):
            continue
        rest = code[found.end : line_end(code, found.end)].strip()
        if used(code, module, name) or rest[:1] not in ("", "#"):
            return code
        if len(found.names) == 1:
            return code[: found.start] + code[line_end(code, found.end) :]
        if place + 1 < len(found.names):
            return splice(code, [(found.names[place].name[0], found.names[place + 1].name[0], "")])
        return splice(code, [(found.names[place - 1].end, found.names[place].end, "")])
    return code


def used(code: str, module: str, name: str) -> bool:
    """Whether what an import binds is used: ``a.b`` of ``import a.b``; and ``a`` alone, unless another import binds it too."""
    path, _, alias = name.partition(" as ")
    local = alias or (path if module else path.split(".")[0])
    chain = (local,) if alias or module else tuple(path.split("."))
    others = [found[3] for found in bindings(code) if not found[2] and found[3] != name and " as " not in found[3]]
    if len(chain) > 1 and not any(other.split(".")[0] == local for other in others):
        chain = chain[:1]
    pattern = re.compile(r"(?<![\w.])" + r"\s*\.\s*".join(map(re.escape, chain)) + r"(?!\w)")
    return any(
        pattern.match(code, token.start) or in_string(code, token, local)
        for token in tokens(code)
        if token.kind != "imports"
    )


def in_string(code: str, token: Token, name: str) -> bool:
    """Whether a string, such as an annotation or ``__all__``, may mean the name."""
    return (
        token.kind in ("strings", "fields")
        and re.search(rf"\b{re.escape(name)}\b", code[token.start : token.end]) is not None
    )
