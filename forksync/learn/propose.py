"""From pairs of files and renames seen in them to a table of rules that each bring the upstream nearer to the fork."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from forksync.git import decode
from forksync.learn.match import Move, dropped, together
from forksync.learn.renames import Renamed, compare, within_names
from forksync.rules.python import CODE
from forksync.rules.rule import Rule
from forksync.table import KINDS

MIN_LINES = 2
"""A rule must bring at least so many lines together."""
WORTH = 0.5
"""The share of the lines it changes that a rule must bring together."""
CANDIDATES = 300
"""Renames tried, those seen most often first."""
PLACES = (*CODE, "literals", "strings", "comments", "text")
NOTHING = {"before": "", "after": ""}


@dataclass
class Learned:
    rules: list[Rule] = field(default_factory=list)
    gains: dict[str, int] = field(default_factory=dict)
    """Lines that each rule brought together, by its name."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Upstream path → fork path."""
    lines_before: int = 0
    """Lines in which the paired files differed."""
    lines_after: int = 0


class Learner:
    """The upstream as the rules found so far translate it, beside the fork."""

    def __init__(self, upstream: Mapping[str, bytes], fork: Mapping[str, bytes]) -> None:
        self.pairs, self.moves = together(upstream, fork)
        self.dropped = dropped(upstream, self.pairs)
        self.lost = next((path for path in upstream if path not in self.pairs), "")
        self.now = {p: decode(data) for p, data in upstream.items() if p in self.pairs and b"\0" not in data}
        self.fork = {path: decode(fork[self.pairs[path]]) for path in self.now}
        self.lines = {path: Counter(text.split("\n")) for path, text in self.fork.items()}
        self.at = {path: path for path in self.pairs}
        self.costs = {path: self.cost(path, text) for path, text in self.now.items()}
        self.learned = Learned(pairs=self.pairs, lines_before=sum(self.costs.values()))

    def cost(self, path: str, text: str) -> int:
        """The lines of the upstream's file that the fork's does not have."""
        return (Counter(text.split("\n")) - self.lines[path]).total()

    def effect(self, rule: Rule) -> tuple[int, dict[str, str]]:
        """The lines that a rule would bring together, none if it does more harm, and the files that it would change."""
        changed = {}
        for path, text in self.now.items():
            after, uses, _ = rule.rewrite(self.at[path], text)
            if uses:
                changed[path] = after
        gain = sum(self.costs[path] - self.cost(path, text) for path, text in changed.items())
        touched = sum(
            (Counter(self.now[p].split("\n")) - Counter(text.split("\n"))).total() for p, text in changed.items()
        )
        return (gain if gain >= WORTH * touched else 0), changed

    def take(self, rule: Rule, gain: int, changed: Mapping[str, str]) -> None:
        self.learned.rules.append(with_example(rule, [(self.now[path], text) for path, text in changed.items()]))
        self.learned.gains[rule.name] = gain
        self.now.update(changed)
        self.costs.update({path: self.cost(path, text) for path, text in changed.items()})
        self.at = {path: rule.move(at) for path, at in self.at.items()}

    # --- what there may be

    def files(self) -> None:
        """Rules for files that are gone or lie elsewhere."""
        if self.dropped:
            example = {"path": self.lost, "becomes": ""}
            self.learned.rules.append(made("drop", "drop", paths=self.dropped, examples=[example]))
        for move in self.moves:
            rule = self.file_rule(move)
            self.take(rule, *self.effect(rule))

    def file_rule(self, move: Move) -> Rule:
        """A folder or file of Python is a module, any other a path."""
        old, new = (re.sub(r"^src/|\.pyi?$", "", side) for side in move)
        files = [at for at in self.at.values() if at == move.old or at.startswith(f"{move.old}/")]
        example = {"path": files[0], "becomes": move.new + files[0][len(move.old) :]}
        names = [part for side in (old, new) for part in side.split("/")]
        if any(path.endswith((".py", ".pyi")) for path in files) and all(part.isidentifier() for part in names):
            kind = "module" if "/" in old else "package"
            dotted = {"from": old.replace("/", "."), "to": new.replace("/", ".")}
            return made(kind, f"{kind} {dotted['from']}", examples=[example], **dotted)
        return made("path", f"path {move.old}", examples=[example], **{"from": move.old, "to": move.new})

    def votes(self) -> Counter[tuple[Renamed, str]]:
        total: Counter[tuple[Renamed, str]] = Counter()
        for path, text in self.now.items():
            if self.costs[path]:
                total.update(compare(self.at[path], text, self.fork[path]))
        return total

    def names(self) -> None:
        """Rules for words that stand as others in the fork."""
        votes = self.votes()
        places: dict[Renamed, set[str]] = {}
        for renamed, place in votes:
            places.setdefault(renamed, set()).add(place)
        for part in within_names(places):
            self.try_rules([part_rule(part)])
        seen = Counter[Renamed]()
        for (renamed, _), count in votes.items():
            seen[renamed] += count
        for renamed, count in sorted(seen.items(), key=lambda vote: (-vote[1], vote[0]))[:CANDIDATES]:
            if count >= MIN_LINES:
                self.try_rules(word_rules(renamed, places[renamed]))

    def try_rules(self, candidates: list[Rule]) -> None:
        """Takes the first of the candidates, from the widest to the narrowest, that is as good as any of them."""
        taken = {rule.name for rule in self.learned.rules}
        effects = [(rule, *self.effect(rule)) for rule in candidates if rule.name not in taken]
        best = max((gain for _, gain, _ in effects), default=0)
        if best >= MIN_LINES:
            self.take(*next(found for found in effects if found[1] == best))


def made(kind: str, name: str, **options: Any) -> Rule:
    return KINDS[kind].model_validate({"kind": kind, "name": name, **{"examples": [NOTHING], **options}})


def part_rule(part: Renamed) -> Rule:
    """A word within names, of the case it was seen in."""
    around = {"islower": ("(?<![A-Za-z])", "(?![a-z])"), "isupper": ("(?<![A-Z])", "(?![A-Z])")}
    before, after = next((pair for test, pair in around.items() if getattr(part.old, test)()), ("", "(?![a-z])"))
    return made("regex", f"part {part.old}", **{"from": f"{before}{re.escape(part.old)}{after}", "to": part.new})


def word_rules(renamed: Renamed, places: Iterable[str]) -> list[Rule]:
    """A flag, or an identifier in ever fewer places, down to those that it was seen in."""
    sides = {"from": renamed.old, "to": renamed.new}
    if renamed.old.startswith("-") or renamed.new.startswith("-"):
        options: list[dict[str, Any]] = [{"dest": True}, {}]
        kind = "flag"
    else:
        seen = [place for place in PLACES if place in places]
        code = [place for place in PLACES if place in places or place in CODE]
        options = [{"places": tried} for tried in (PLACES, code, seen)]
        kind = "identifier"
    try:
        return [made(kind, f"{kind} {renamed.old}", **sides, **option) for option in options]
    except ValidationError:
        return []  # such as a word of digits, or half a flag


def with_example(rule: Rule, changes: Iterable[tuple[str, str]]) -> Rule:
    """The rule with its shortest changed line as an example, where a single line shows the change."""
    lines = {
        pair
        for before, after in changes
        for pair in zip(before.split("\n"), after.split("\n"), strict=False)
        if pair[0] != pair[1] and pair[0].isprintable()
    }
    for old, new in sorted(lines, key=lambda pair: (len(pair[0]), pair))[:50]:
        for path in ("example.py", "example.txt"):
            if rule.rewrite(path, old)[0] == new:
                shown = {"before": old, "after": new, **({"path": path} if path != "example.py" else {})}
                kept = [
                    example.model_dump(exclude_none=True) for example in rule.examples if example.becomes is not None
                ]
                return made(rule.kind, rule.name, **{**given(rule), "examples": [*kept, shown]})
    return rule


def given(rule: Rule) -> dict[str, Any]:
    """A rule's options as a table has them, without those that are the defaults."""
    return rule.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"kind", "name", "examples"})


def learn(upstream: Mapping[str, bytes], fork: Mapping[str, bytes]) -> Learned:
    """A first table from the upstream's files and the fork's."""
    learner = Learner(upstream, fork)
    learner.files()
    learner.names()
    learner.learned.lines_after = sum(learner.costs.values())
    return learner.learned
