"""What the driver needs to know of a model's shape, from the folder's own ``config.json``; imports no torch."""

from __future__ import annotations

import functools
import json
from pathlib import Path


@functools.cache
def hidden_size(folder: str) -> int:
    """Width of the decoder's layers; 1024 where the configuration calls it otherwise: it only balances work."""
    shape = json.loads((Path(folder) / "config.json").read_text())
    return int(shape.get("text_config", shape).get("hidden_size", 1024))


def vocabulary(folder: str) -> int:
    """Number of token ids the model knows; of a model whose configuration does not say it, one that is never reached."""
    shape = json.loads((Path(folder) / "config.json").read_text())
    return int(shape.get("text_config", shape).get("vocab_size", 1 << 31))
