"""A table as TOML text, in the shape in which a person goes on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forksync.learn.propose import Learned, given
from forksync.rules.rule import Rule


def value(of: Any) -> str:
    """A TOML value on one line. A JSON string is a TOML string."""
    if isinstance(of, bool):
        return "true" if of else "false"
    if isinstance(of, Mapping):
        return f"{{ {', '.join(f'{key} = {value(one)}' for key, one in of.items())} }}"
    if isinstance(of, list | tuple):
        return f"[{', '.join(value(one) for one in of)}]"
    return json.dumps(of, ensure_ascii=False)


def rule_text(rule: Rule) -> str:
    examples = [value(example.model_dump(exclude_none=True, exclude_defaults=True)) for example in rule.examples]
    lines = ["[[rule]]", f"kind = {value(rule.kind)}", f"name = {value(rule.name)}"]
    lines += [f"{key} = {value(one)}" for key, one in given(rule).items()]
    lines += ["examples = [", *(f"    {example}," for example in examples), "]"]
    return "\n".join(lines)


def table_text(learned: Learned) -> str:
    """The table with what speaks for each rule."""
    head = (
        f"# Proposed from {len(learned.pairs)} pairs of files. Of the upstream's lines in them {learned.lines_before} differed "
        f"from the fork's, with these rules {learned.lines_after} do.\n"
        "# Read every rule, give it a name that says why, and take out what is chance.\n"
    )
    blocks = []
    for rule in learned.rules:
        gain = learned.gains.get(rule.name)
        blocks.append(f"{f'# brings {gain} lines together' + chr(10) if gain else ''}{rule_text(rule)}\n")
    return "\n".join([head, *blocks])
