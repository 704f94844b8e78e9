"""Modules of slime and of vime (the fork of it) that functions written for them import: the same names, ours behind them.

Only where there is no such module: an installed slime is imported as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

COUNTERPARTS = {
    "utils.types": "vime.slime.sample",
    "utils.misc": "vime.slime.hooks",
    "utils.http_utils": "vime.slime.serving",
    "utils.async_utils": "vime.slime.serving",
    "rollout.base_types": "vime.slime.sample",
    "rollout.data_source": "vime.slime.sources",
    "rollout.sglang_rollout": "vime.slime.serving",
    "rollout.vllm_rollout": "vime.slime.serving",
    "rollout.filter_hub.base_types": "vime.slime.sample",
    "rollout.filter_hub.dynamic_sampling_filters": "vime.slime.filters",
}
PACKAGES = {".".join(name.split(".")[:depth]) for name in COUNTERPARTS for depth in range(1, name.count(".") + 1)}


class Finder(MetaPathFinder, Loader):
    """``slime.X`` and ``vime.X`` of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root in ("slime", "vime") and (rest in COUNTERPARTS or rest in PACKAGES or fullname == "slime"):
            return ModuleSpec(fullname, self, is_package=rest not in COUNTERPARTS)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        rest = module.__name__.partition(".")[2]
        if rest in COUNTERPARTS:
            sys.modules[module.__name__] = importlib.import_module(COUNTERPARTS[rest])


def install() -> None:
    """Makes the names importable; called before a function is loaded."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
