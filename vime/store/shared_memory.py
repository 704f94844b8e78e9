"""Sample payloads between the process that made them and the trainer rank that needs them, in memory of one host.

A store has the methods ``put``, ``get``, ``drop``, ``copy_to`` and ``copy_from``; one that spans hosts is another class. The
driver keeps keys and lengths, never the arrays. Files are safetensors: nothing in them can run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vime.sample import Sample


class StoreError(Exception):
    """A payload cannot be written or read; the message names the key."""


@dataclass(frozen=True)
class Payload:
    """Arrays of one sample: ids int32 [prompt] and [response], log-probabilities float32 and mask uint8 [response].

    ``reference`` and ``teacher`` are None unless a server scored the response with these models, ``experts`` (uint8 or
    uint16 [prompt + response - 1, layers, experts a token]) unless the server told how it routed.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None
    experts: np.ndarray | None = None


FIELDS = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "logprobs": np.float32,
    "loss_mask": np.uint8,
    "reference": np.float32,
    "teacher": np.float32,
    "experts": None,  # as it came
}


class SharedMemoryStore:
    """A folder of a memory-backed file system; one file a group, rows by index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def put(self, key: str, samples: Sequence[Sample] | Sequence[Payload]) -> None:
        """Writes the rows of one group; they appear at once or not at all."""
        arrays = {
            f"{row}.{field}": np.asarray(getattr(sample, field), dtype=dtype)
            for row, sample in enumerate(samples)
            for field, dtype in FIELDS.items()
            if getattr(sample, field) is not None
        }
        draft = self._path(key).with_suffix(".tmp")
        try:
            save_file(arrays, draft)
            os.rename(draft, self._path(key))
        except (OSError, SafetensorError) as error:
            raise StoreError(f"payload {key} cannot be written to {self.folder}: {error}; free memory there") from None

    def get(self, key: str, row: int) -> Payload:
        """One row of a group; only its bytes are read."""
        try:
            with safe_open(self._path(key), framework="np") as opened:
                held = set(opened.keys())
                return Payload(
                    **{name: opened.get_tensor(f"{row}.{name}") for name in FIELDS if f"{row}.{name}" in held}
                )
        except Exception as error:
            raise StoreError(f"payload {key}, row {row}, cannot be read from {self.folder}: {error}") from None

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def copy_to(self, folder: Path, keys: Iterable[str]) -> None:
        """Copies payloads out, to be taken up again by ``copy_from``."""
        folder.mkdir(parents=True, exist_ok=True)
        for key in keys:
            shutil.copyfile(self._path(key), folder / self._path(key).name)

    def copy_from(self, folder: Path, keys: Iterable[str]) -> None:
        try:
            for key in keys:
                shutil.copyfile(folder / self._path(key).name, self._path(key))
        except OSError as error:
            raise StoreError(f"payloads cannot be taken up from {folder}: {error}") from None

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
