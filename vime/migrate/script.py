"""Reads the flags of a bash launch script without running anything.

What is understood: variables with defaults, arithmetic, arrays and what is added to them, sourced files, quotes, comments,
continued lines, plain conditions, ``seq``; and the command with train.py in it. What cannot be known without running it is
left as it is written, and noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
ENDS = "\n;|&"
CLOSING = {"(": ")", "{": "}"}
TRAIN = re.compile(r"(^|/)train(_async)?\.py$")
COMPARE = {
    "==": lambda a, b: a == b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
}


class ScriptError(Exception):
    """The script cannot be read; the message says where and why."""


@dataclass
class Statement:
    """Words as they are written, quotes and all; an array's are in ``array``."""

    line: int
    words: list[str] = field(default_factory=list)
    array: list[str] | None = None


def skip(text: str, at: int) -> int:
    """Where what begins at ``at`` ends: a quoted text, ``${...}``, ``$(...)``, or one character."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    if text[at] in '"`':
        mark, at = text[at], at + 1
        while at < len(text) and text[at] != mark:
            at = skip(text, at) if text[at] in "\\$" else at + 1
        return at + 1
    if text[at] == "$" and text[at + 1 : at + 2] in CLOSING:
        opening, at, depth = text[at + 1], at + 2, 1
        while at < len(text) and depth:
            if text[at] in "\\'\"$`":
                at = skip(text, at)
                continue
            depth += (text[at] == opening) - (text[at] == CLOSING[opening])
            at += 1
        return at
    return at + 1


def statements(text: str) -> Iterator[Statement]:
    """The script's simple commands, one after the other."""
    current, word, at, line = Statement(1), "", 0, 1
    array: list[str] | None = None
    while at <= len(text):
        char = text[at] if at < len(text) else "\n"
        if text[at : at + 2] == "\\\n":
            at, line = at + 2, line + 1
            continue
        if char == "#" and not word:
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        redirects = char == "&" and (word.endswith((">", "<")) or text[at + 1 : at + 2] == ">")
        if char in " \t" or (char in ENDS and not redirects) or (array is not None and char == ")"):
            if word:
                (current.words if array is None else array).append(word)
                word = ""
            if array is not None and char == ")":
                current.array, array = array, None
            elif array is None and char in ENDS:
                if current.words:
                    yield current
                current = Statement(line + (char == "\n"))
            line += char == "\n"
            at += 1
            continue
        if array is None and char == "(" and re.fullmatch(rf"{NAME}\+?=", word):
            current.words.append(word)
            array, word, at = [], "", at + 1
            continue
        end = skip(text, at)
        word += text[at:end]
        line += text.count("\n", at, end)
        at = end
    if array is not None:
        raise ScriptError(f"the array {current.words[-1]}( of line {current.line} has no end")


@dataclass
class Flag:
    """One flag of train.py and its values; ``times`` it was given, the last of which counts."""

    name: str
    values: list[str]
    times: int = 1


class Script:
    """The flags of ``path``; ``notes`` say what could not be known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.command: list[str] = []  # of the last train.py, itself first
        self.read(path)
        if not self.command:
            raise ScriptError(f"{path} runs no train.py; name the launch script itself")

    @property
    def asynchronous(self) -> bool:
        return self.command[0].endswith("train_async.py")

    def read(self, path: Path) -> None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ScriptError(f"{path} cannot be read: {error}") from None
        self.run(list(statements(text)), path)

    def run(self, lines: list[Statement], path: Path) -> None:
        """Carries out assignments, sourced files and plain conditions."""
        branches: list[bool] = []  # of the conditions that are open: whether their present branch is read
        taken: list[bool] = []  # and whether one of their branches has been
        loops = 0
        for statement in lines:
            words = statement.words
            while words and words[0] in ("then", "do", "else", "fi", "done", "esac", "{", "}", "export", "local"):
                word, words = words[0], words[1:]
                if word == "else":
                    branches[-1] = not taken[-1]
                elif word == "fi" and branches:
                    branches.pop()
                    taken.pop()
                elif word in ("done", "esac"):
                    loops = max(0, loops - 1)
            if not words:
                continue
            if words[0] in ("for", "while", "until", "case"):
                loops += 1
            elif words[0] in ("if", "elif"):
                outer = branches if words[0] == "if" else branches[:-1]
                holds = not loops and all(outer) and self.holds(words[1:], statement.line, path)
                if words[0] == "if":
                    branches.append(holds)
                    taken.append(holds)
                else:
                    branches[-1] = holds and not taken[-1]
                    taken[-1] |= branches[-1]
            elif not loops and all(branches):
                self.step(Statement(statement.line, words, statement.array), path)

    def step(self, statement: Statement, path: Path) -> None:
        words = statement.words
        if (found := ASSIGNMENT.fullmatch(words[-1])) and statement.array is not None:
            name, more = found[1], found[2]
            fields = [part for word in statement.array for part in self.expand(word, path)]
            self.arrays[name] = [*(self.arrays.get(name, []) if more else []), *fields]
        elif all(ASSIGNMENT.fullmatch(word) for word in words):
            for word in words:
                name, more, value = ASSIGNMENT.fullmatch(word).groups()  # type: ignore[union-attr]
                before = self.variables.get(name, "") if more else ""
                self.variables[name] = before + "".join(self.expand(value, path, split=False))
        elif words[0] in ("source", "."):
            self.source("".join(self.expand(words[1], path, split=False)), statement.line, path)
        else:
            fields = [part for word in words for part in self.expand(word, path)]
            for place, one in enumerate(fields):
                if TRAIN.search(one):
                    self.command = without_redirections(fields[place:])

    def source(self, name: str, line: int, path: Path) -> None:
        found = Path(name) if Path(name).is_absolute() else path.parent / name
        if found.exists():
            self.read(found)
        else:
            self.notes.append(f"{path.name}, line {line}: {name} is not there; what it sets is not in the table")

    def holds(self, words: list[str], line: int, path: Path) -> bool:
        """Whether the condition holds; one that cannot be decided counts as true, and is noted."""
        given = ["".join(self.expand(word, path, split=False)) for word in words if word not in ("[", "]", "[[", "]]")]
        match given:
            case ["-n" | "-z" as test, value] if "$" not in value:
                return bool(value) == (test == "-n")
            case [left, operator, right] if operator in COMPARE and "$" not in left + right:
                try:
                    return bool(COMPARE[operator](left, right))
                except ValueError:
                    pass
        self.notes.append(
            f"{path.name}, line {line}: whether `{' '.join(words)}` holds is not known; it was read as if it did"
        )
        return True

    def expand(self, word: str, path: Path, split: bool = True) -> list[str]:
        """The fields that bash makes of a word; none of an unquoted empty value, several of an array."""
        fields, filled = [""], False
        at = 0
        while at < len(word):
            end = skip(word, at)
            piece, quoted = word[at:end], word[at] in "\"'"
            if word[at] == "$" and end == at + 1 and (plain := re.match(NAME, word[end:])):
                end += plain.end()
                piece = word[at:end]
            at = end
            if piece[0] == "'":
                found = [piece[1:-1]]
            elif piece[0] == '"':
                found = self.inside(piece[1:-1], path)
            elif piece[0] == "\\":
                found = [piece[1:]]
            elif piece[0] == "$" and len(piece) > 1:
                found = self.value(piece, path)
                found = (
                    [part for one in found for part in one.split()] if split and "$" not in "".join(found) else found
                )
            else:
                found = [piece]
            filled |= quoted or bool(found and any(found))
            if found:
                fields[-1] += found[0]
                fields += found[1:]
        return fields if filled or not split else []

    def inside(self, text: str, path: Path) -> list[str]:
        """Of a text between double quotes."""
        if re.fullmatch(rf"\$\{{{NAME}\[@\]\}}", text):
            return self.value(text, path)
        made, at = "", 0
        while at < len(text):
            end = skip(text, at) if text[at] in "\\$`" else at + 1
            if text[at] == "$" and end == at + 1 and (plain := re.match(NAME, text[end:])):
                end += plain.end()
            piece, at = text[at:end], end
            if piece[0] == "\\":
                made += piece[1:] if piece[1:] in ('"', "\\", "$", "`") else piece
            elif piece[0] == "$" and len(piece) > 1:
                made += " ".join(self.value(piece, path))
            else:
                made += piece
        return [made]

    def value(self, piece: str, path: Path) -> list[str]:
        """Of ``$X``, ``${X...}``, ``$((...))`` or ``$(...)``; as it is written where it is not known."""
        if piece.startswith("$((") and piece.endswith("))"):
            inner = re.sub(rf"\$?\{{?({NAME})\}}?", lambda found: self.variables.get(found[1], found[1]), piece[3:-2])
            return [str(calculated(inner))] if re.fullmatch(r"[\d\s()+*/%-]+", inner) else [piece]
        if piece.startswith("$("):
            return self.output(piece, path)
        if found := re.fullmatch(rf"\$\{{({NAME})\[[@*]\](?:\+.*)?\}}", piece, re.DOTALL):
            return self.arrays.get(found[1], [])
        if found := re.fullmatch(rf"\$\{{?({NAME})(?::?([-=?+])(.*?))?\}}?", piece, re.DOTALL):
            name, operator, default = found.groups()
            if self.variables.get(name):
                return self.expand(default, path, split=False) if operator == "+" else [self.variables[name]]
            if operator in ("-", "="):
                return self.expand(default, path, split=False)
            return [""] if operator == "+" or name in self.variables else [piece]
        return [piece]

    def output(self, piece: str, path: Path) -> list[str]:
        """Of ``$(command)``: the script's own folder, and ``seq``; nothing is run."""
        inner = piece[2:-1].strip()
        if "BASH_SOURCE" in inner or re.search(r"dirname .*\$\{?0", inner):
            folder = path.resolve().parent
            return [str(folder.parent if "/.." in inner else folder)]
        if found := re.fullmatch(r"cd (?:-- )?(.*?)(?: *&?>/dev/null)? *&& *pwd(?: -P)?", inner):
            named = "".join(self.expand(found[1], path, split=False))
            return [str(Path(named).resolve())] if "$" not in named else [piece]
        if found := re.fullmatch(r"seq( -?\d+){1,3}", inner):
            numbers = [int(one) for one in inner.split()[1:]]
            first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) == 3 else 1)
            return [" ".join(map(str, range(first, numbers[-1] + (1 if step > 0 else -1), step or 1)))]
        return [piece]

    def flags(self) -> list[Flag]:
        """Each flag once, in the order they are first given."""
        found: dict[str, Flag] = {}
        current: Flag | None = None
        for word in self.command[1:]:
            if word.startswith("--"):
                name, given, value = word[2:].partition("=")
                name = name.replace("-", "_")
                times = found[name].times + 1 if name in found else 1
                current = found[name] = Flag(name, [value] if given else [], times)
            elif current is not None:
                current.values.append(word)
        return list(found.values())


def calculated(text: str) -> int:
    """Of whole numbers with + - * / % and parentheses, as bash does."""
    tokens = re.findall(r"\d+|[()+*/%-]", text)

    def factor() -> int:
        token = tokens.pop(0)
        if token == "(":
            value = total()
            tokens.pop(0)
            return value
        return -factor() if token == "-" else int(token)

    def product() -> int:
        value = factor()
        while tokens and tokens[0] in "*/%":
            operator, right = tokens.pop(0), factor()
            value = value * right if operator == "*" else value // right if operator == "/" else value % right
        return value

    def total() -> int:
        value = product()
        while tokens and tokens[0] in "+-":
            value = value + product() if tokens.pop(0) == "+" else value - product()
        return value

    return total()


def without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    drop = False
    for word in words:
        if drop:
            drop = False
        elif re.match(r"[\d&]*[<>]", word):
            drop = bool(re.fullmatch(r"[\d&]*[<>]{1,2}", word))
        else:
            kept.append(word)
    return kept
