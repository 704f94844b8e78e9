"""The translation table: ordered rules that make of an upstream's file the fork's spelling of it. Pure: text in, text out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forksync.config import ConfigError, faults, line_of, read_toml
from forksync.git import decode, encode
from forksync.rules.calls import Call
from forksync.rules.modules import Module, Package
from forksync.rules.names import Flag, Identifier
from forksync.rules.paths import Drop, Keep, MovePath
from forksync.rules.rule import Rule, compiled
from forksync.rules.text import Regex

FORMAT = 1
"""Part of every table's hash: to be raised when equal rules begin to give other results."""

KINDS: dict[str, type[Rule]] = {
    "identifier": Identifier,
    "module": Module,
    "package": Package,
    "flag": Flag,
    "path": MovePath,
    "drop": Drop,
    "keep": Keep,
    "call": Call,
    "regex": Regex,
}
"""A new kind of rule is one class and one line here."""

BINARY_WINDOW = 8000
"""A file with a NUL among its first bytes is binary, as git has it. Its path is translated, its content is not."""


@dataclass(frozen=True)
class Warning:
    """Something about a rule that a person should look at."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"rule {self.rule}: {self.text}"


@dataclass
class Translated:
    """One file after the table."""

    data: bytes
    uses: Counter[str] = field(default_factory=Counter)
    """How often each rule changed the content."""
    warnings: list[Warning] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    rules: tuple[Rule, ...]
    hash: str
    """Of the rules' meaning, not of the file's layout: comments and order of keys do not matter."""

    def place(self, path: str) -> tuple[str | None, Counter[str]]:
        """Where the upstream's file at ``path`` lies in the mirror, None if nowhere, and the rules that said so."""
        at, kept, uses = path, True, Counter[str]()
        decided = ""
        for rule in self.rules:
            if not rule.moves or not rule.covers(path):
                continue
            says = rule.keeps(path)
            if says is not None:
                kept, decided = says, rule.name
            moved = rule.move(at)
            if moved != at:
                uses[rule.name] += 1
            at = moved
        if decided:
            uses[decided] += 1
        return (at if kept else None), uses

    def translate(self, path: str, data: bytes) -> Translated:
        """The content of the upstream's file at ``path`` after all rules."""
        if b"\0" in data[:BINARY_WINDOW]:
            return Translated(data)
        text, at = decode(data), path
        result = Translated(data)
        for rule in self.rules:
            if not rule.covers(path):
                continue
            changed, uses, said = rule.rewrite(at, text)
            result.uses[rule.name] += uses
            result.warnings += [Warning(rule.name, f"{path}: {fault}") for fault in said]
            if rule.never and changed != text:
                result.warnings += unwanted(rule, path, text, changed)
            text, at = changed, rule.move(at)
        result.data = encode(text)
        result.uses = +result.uses
        return result

    def check(self, uses: Counter[str]) -> list[Warning]:
        """Rules whose count over a whole tree is not what the table expects."""
        found = []
        for rule in self.rules:
            count = uses[rule.name]
            if count < rule.at_least:
                what = (
                    "matches nothing any more"
                    if count == 0
                    else f"matched {count} times, expected at least {rule.at_least}"
                )
                found.append(Warning(rule.name, f"{what}; mend or remove it, or set at_least"))
            if rule.at_most is not None and count > rule.at_most:
                found.append(Warning(rule.name, f"matched {count} times, expected at most {rule.at_most}"))
        return found


def unwanted(rule: Rule, path: str, before: str, after: str) -> list[Warning]:
    """The lines that the rule changed although one of its ``never`` patterns matches them."""
    kept = set(after.split("\n"))
    found = []
    for number, line in enumerate(before.split("\n"), 1):
        for pattern in rule.never:
            if line not in kept and (match := compiled(pattern).search(line)):
                found.append(
                    Warning(rule.name, f"{path}:{number}: changed a line with {match[0]!r}, which it should not match")
                )
    return found


def meaning(rules: tuple[Rule, ...]) -> str:
    """The hash of what the rules do. Names count, since results are counted by them; examples do not."""
    told = [rule.model_dump(mode="json", exclude={"examples"}) for rule in rules]
    return hashlib.sha256(json.dumps([FORMAT, told], sort_keys=True).encode()).hexdigest()


def table_of(rules: tuple[Rule, ...]) -> Table:
    return Table(rules, meaning(rules))


def parse(tree: dict[str, Any], text: str, file: Path) -> Table:
    """The table in a TOML tree. ConfigError has one line for each fault, failing examples included."""
    wrong: list[str] = []
    rules: list[Rule] = []
    for key in tree:
        if key != "rule":
            wrong.append(f"{file}:{line_of(text, (key,))}: {key} is not known here; a table is a list of [[rule]]")
    listed = tree.get("rule", [])
    if not isinstance(listed, list) or not all(isinstance(raw, dict) for raw in listed):
        raise ConfigError(f"{file}:{line_of(text, ('rule',))}: rule must be a list of tables: write [[rule]]")
    for number, raw in enumerate(listed):
        kind = raw.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            line = line_of(text, ("rule", number, "kind"))
            wrong.append(f"{file}:{line}: rule.kind = {json.dumps(kind)}: must be one of {', '.join(KINDS)}")
            continue
        try:
            rules.append(KINDS[kind].model_validate(raw))
        except ValidationError as error:
            wrong.append(faults(error, file, text, KINDS[kind], ("rule", number)))
            continue
        line = line_of(text, ("rule", number))
        wrong += [f"{file}:{line}: {fault}" for fault in failing_examples(rules[-1])]
        if rules[-1].name in {rule.name for rule in rules[:-1]}:
            wrong.append(f"{file}:{line}: a second rule is called {rules[-1].name!r}; names are unique")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return table_of(tuple(rules))


def failing_examples(rule: Rule) -> list[str]:
    """What is wrong with a rule by its own examples."""
    alone = table_of((rule,))
    found = []
    for example in rule.examples:
        if example.becomes is not None and (at := alone.place(example.path)[0] or "") != example.becomes:
            found.append(f"rule {rule.name}: its example {example.path!r} becomes {at!r}, not {example.becomes!r}")
        if example.before is None:
            continue
        text = decode(alone.translate(example.path, encode(example.before)).data)
        if text != example.after:
            found.append(f"rule {rule.name}: its example {example.before!r} becomes {text!r}, not {example.after!r}")
    return found


def load(path: Path) -> Table:
    """The table in a file. ConfigError names each fault with its line."""
    return parse(*read_toml(path), path)
