"""Writes config-reference.md, the table of all options, from the option classes themselves.

python docs/generate_config_reference.py
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vime.config.load import allowed, options, section_class
from vime.config.sections import Config
from vime.config.supervised import Supervised

TARGET = Path(__file__).with_name("config-reference.md")
HEAD = """\
# All options

Made by `python docs/generate_config_reference.py` from the sections in `vime/config/`; change the
explanations there. How files, overrides and the dry run work is told in [configuration](configuration.md).

`vime train`, `vime eval` and `vime check` take the sections that come first; `vime sft` and `vime reward-model` take
[those at the end](#vime-sft-and-vime-reward-model)."""
SUPERVISED = """
# vime sft and vime reward-model

`[model]`, `[trainer]`, `[lora]`, `[checkpoint]` and `[log]` are those above. [SFT](sft.md) says how the others work."""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"`{json.dumps(value)}`"


def purposes(kind: type[BaseModel]) -> dict[str, str]:
    """First paragraph of each section's docstring, by section name."""
    return {
        name: cell((inner.__doc__ or "").split("\n\n")[0])
        for name, field in kind.model_fields.items()
        if (inner := section_class(field.annotation))
    }


def tables(kind: type[BaseModel], head: str, without: Collection[str] = ()) -> list[str]:
    lines, last, about = [head], None, purposes(kind)
    for name, field, text in options(kind):
        section, _, option = name.rpartition(".")
        if section in without:
            continue
        if section != last:
            title = f"[{section}]" if section else "[vllm] and [router]"
            purpose = about.get(section) or ("" if section else "Flags of the two programs, passed through.")
            lines.append(f"\n## {title}\n\n{purpose}\n" if purpose else f"\n## {title}\n")
            lines += ["| option | kind | default | meaning |", "|---|---|---|---|"]
            last = section
        lines.append(f"| `{option}` | {cell(allowed(field.annotation))} | {default_of(field)} | {cell(text)} |")
    return lines


def reference() -> str:
    lines = tables(Config, HEAD) + tables(Supervised, SUPERVISED, ("model", "trainer", "lora", "checkpoint", "log"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference())
    print(TARGET)
