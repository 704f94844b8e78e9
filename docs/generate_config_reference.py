"""Writes config-reference.md, the table of all options, from the option classes themselves.

python docs/generate_config_reference.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.config.load import allowed, options, section_class
from vime.config.sections import Config

TARGET = Path(__file__).with_name("config-reference.md")
HEAD = """\
# All options

Made by `python docs/generate_config_reference.py` from `vime/config/sections.py`; change the explanations there.
How files, overrides and the dry run work is told in [configuration](configuration.md)."""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"`{json.dumps(value)}`"


def purposes() -> dict[str, str]:
    """First line of each section's docstring, by section name."""
    return {
        name: (inner.__doc__ or "").strip().splitlines()[0]
        for name, field in Config.model_fields.items()
        if (inner := section_class(field.annotation))
    }


def reference() -> str:
    lines, last, about = [HEAD], None, purposes()
    for name, field, text in options():
        section, _, option = name.rpartition(".")
        if section != last:
            title = f"[{section}]" if section else "[vllm] and [router]"
            purpose = about.get(section) or ("" if section else "Flags of the two programs, passed through.")
            lines.append(f"\n## {title}\n\n{purpose}\n" if purpose else f"\n## {title}\n")
            lines += ["| option | kind | default | meaning |", "|---|---|---|---|"]
            last = section
        lines.append(f"| `{option}` | {cell(allowed(field.annotation))} | {default_of(field)} | {cell(text)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference())
    print(TARGET)
