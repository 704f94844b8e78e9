"""The tables that the guide and the example show are tables that load."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from forksync.config import Config
from forksync.rules.python import Place
from forksync.table import KINDS, load, parse

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "forksync.md").read_text()
BLOCKS = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)]


def test_every_table_in_the_guide_loads_and_passes_its_examples() -> None:
    tables = [block for block in BLOCKS if "rule" in block]
    assert tables
    assert all(parse(block, "", Path("docs/forksync.md")).rules for block in tables)


def test_every_configuration_in_the_guide_is_valid() -> None:
    settings = [block for block in BLOCKS if block.keys() <= Config.model_fields.keys()]
    assert settings
    for block in settings:
        Config.model_validate(block)


def test_the_guide_names_every_kind_of_rule_its_keys_and_every_place() -> None:
    for kind, rule in KINDS.items():
        assert f"`{kind}`" in GUIDE
        for name, field in rule.model_fields.items():
            assert f"`{field.alias or name}`" in GUIDE, (kind, name)
    assert all(f"`{place}`" in GUIDE for place in Place.__args__)  # type: ignore[attr-defined]


def test_the_proofs_table_loads() -> None:
    assert len(load(ROOT / "examples" / "forksync" / "nebula" / "table.toml").rules) >= 10
