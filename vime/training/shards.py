"""The trainer's state in a folder of shards: every rank writes its own and reads what it needs of all; nothing is gathered.

The files are those of torch.distributed.checkpoint's Hugging Face storage, one a rank: safetensors whose header says where
in the whole each shard lies. Its reader and its planning of reads are used, so any number of ranks and any split can read
them. Its writer is not: it copies every shard twice more in memory, its ranks agree by pickle, and a shard must be one box.
"""

from __future__ import annotations

import functools
import json
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from vime.training.learner import EngineError
from vime.training.mesh import Mesh
from vime.training.pieces import is_split, local, pieces

State = dict[str, torch.Tensor]  # by "PART.KIND.NAME", e.g. "policy.exp_avg.model.norm.weight"
FAULT_BYTES = 1000  # of a rank's message that the others get


def writes(name: str, tensor: torch.Tensor, mesh: Mesh) -> bool:
    """Whether it is this rank, of those that hold the same of the tensor, that writes it: they take turns."""
    turn, copies = crc32(name.encode()), [(mesh.rank, dist.get_world_size())]
    if isinstance(tensor, DTensor):
        places = zip(
            tensor.device_mesh.get_coordinate() or (), tensor.device_mesh.shape, tensor.placements, strict=True
        )
        copies = [(place, size) for place, size, placement in places if placement.is_replicate()]
        if not is_split(tensor):
            copies.append((mesh.tensor_rank, mesh.tensors))
    return all(place == turn % size for place, size in copies)


@functools.cache
def threads_group(timeout_s: float) -> dist.ProcessGroup:
    """Of the writing threads alone: what they exchange must not meet the main threads' collectives. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


class Saver:
    """Saves in the background, one save at a time: ``stage`` copies, ``start`` lets a thread write, ``wait`` says how it went.
    ``timeout_s`` is how much longer one rank may write than another.

    The host memory that takes the copies (pinned for a GPU) is kept from save to save. All but ``wait`` is collective.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh = mesh
        self.group = threads_group(timeout_s)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.thread: threading.Thread | None = None
        self.faults: list[str] = []

    def stage(self, state: State, folder: Path) -> Callable[[], None]:
        """Copies what this rank writes; gives what writes the copies to its files in ``folder``."""
        if self.thread is not None:
            self.thread.join()
        shards = [
            (name, number, piece, offsets)
            for name, tensor in state.items()
            if writes(name, tensor, self.mesh)
            for number, (piece, offsets) in enumerate(pieces(tensor))
        ]
        sizes = [-(-piece.nbytes // 16) * 16 for _, _, piece, _ in shards]  # every dtype's view begins at a multiple
        on_gpu = any(piece.is_cuda for _, _, piece, _ in shards)
        self._reserve(sum(sizes), pinned=on_gpu)
        files: dict[int, tuple[State, dict[str, Any]]] = {0: ({}, {})}  # a second box of a tensor goes to a second file
        for (name, number, piece, offsets), memory in zip(shards, self.memory[: sum(sizes)].split(sizes), strict=True):
            copy = memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
            copies, places = files.setdefault(number, ({}, {}))
            copies[name] = copy.copy_(piece, non_blocking=True)
            places[name] = {"saved_offsets": offsets}
        if on_gpu:
            torch.cuda.synchronize()

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for number, (copies, places) in files.items():
                header = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
                save_file(copies, folder / file_name(self.mesh.rank, dist.get_world_size(), number), header)

        return write

    def _reserve(self, size: int, pinned: bool) -> None:
        """Host memory of at least ``size`` bytes; pinned as one, for torch's allocator would round it up to a power of two."""
        if size <= self.memory.numel():
            return
        if self.memory.numel() and pinned:
            unpin_memory(self.memory.data_ptr())
        self.memory = torch.empty(size, dtype=torch.uint8)
        if pinned:
            pin_memory(self.memory.data_ptr(), size)

    def start(self, write: Callable[[], None]) -> None:
        """Lets a thread carry out ``write``; it is done when every rank's is."""
        self.thread = threading.Thread(target=self._run, args=(write,), daemon=True)
        self.thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        fault = ""
        try:
            write()
        except Exception as error:
            traceback.print_exc()
            fault = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"
        try:
            self.faults = exchange(fault, self.group)
        except RuntimeError as error:  # a rank has ended
            self.faults = [fault or f"rank {self.mesh.rank} no longer reaches the others: {error}"]

    def wait(self) -> None:
        """Returns when all ranks have written what was started last; EngineError with what went wrong, once."""
        if self.thread is not None:
            self.thread.join()
        faults, self.faults = [fault for fault in self.faults if fault], []
        if faults:
            raise EngineError(f"the checkpoint could not be written: {'; '.join(faults)}")


def exchange(text: str, group: dist.ProcessGroup) -> list[str]:
    """Every rank's text, cut to FAULT_BYTES, in the order of the ranks."""
    mine = torch.frombuffer(bytearray(text.encode()[:FAULT_BYTES].ljust(FAULT_BYTES, b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in found]


def file_name(rank: int, ranks: int, number: int = 0) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}{f'-{number}' if number else ''}.safetensors"


class Planner(DefaultLoadPlanner):
    """Plans to read what fills the pieces of a state."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            wanted = [ChunkStorageMetadata(offsets, piece.shape) for piece, offsets in pieces(tensor)]
            items += create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], wanted)  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece for piece, offsets in pieces(self.state_dict[index.fqn]) if offsets == index.offset)


class Saved:
    """A state that some number of ranks saved in ``folder``; EngineError where it is not whole. ``names`` are its tensors'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.instead = f"remove {folder.parent} and --resume takes the checkpoint before it"
        files = {path.name for path in folder.glob("rank-*.safetensors")}
        if not files:
            raise EngineError(
                f"{folder} holds no shards: another version of vime wrote this checkpoint; resume with that one, or start "
                f"a new run with its weights: --model.path {folder.parent / 'model'}"
            )
        ranks = int(min(files).partition("-of-")[2][:5])
        for name in (file_name(rank, ranks) for rank in range(ranks)):
            if name not in files:
                raise EngineError(f"{folder / name} is missing; {self.instead}")
        for name in files:
            try:
                with safe_open(folder / name, framework="pt"):
                    pass
            except SafetensorError as error:
                raise EngineError(f"{folder / name} is damaged ({error}); {self.instead}") from None
        self.reader = HuggingFaceStorageReader(str(folder))
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.tensors = cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)
        self.names = self.tensors.keys()

    def load(self, state: State) -> None:
        """Fills ``state``, which must be all that was saved of its parts; each rank reads its own shards."""
        self._check(state)
        planner = Planner()
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        with torch.no_grad():
            self.reader.read_data(planner.create_local_plan(), planner)
        for name, tensor in state.items():
            if not torch.isfinite(local(tensor)).all():
                raise EngineError(f"{self.folder}: {name} holds values that are not finite; {self.instead}")

    def _check(self, state: State) -> None:
        parts = {name.partition(".")[0] for name in state}
        present = {name for name in self.names if name.partition(".")[0] in parts}
        other = "resume with the model.path and the [lora] that the run began with"
        for names, said in (
            (state.keys() - present, "lacks"),
            (present - state.keys(), "holds, which the model lacks,"),
        ):
            if names:
                raise EngineError(f"{self.folder} {said} {', '.join(sorted(names)[:3])} ({len(names)} in all); {other}")
        for name, tensor in state.items():
            saved = self.tensors[name]
            if saved.size != tensor.shape:
                raise EngineError(
                    f"{self.folder}: {name} has the shape {[*saved.size]} and the model's {[*tensor.shape]}; {other}"
                )
            if sum(chunk.sizes.numel() for chunk in saved.chunks) != tensor.numel():
                raise EngineError(f"{self.folder}: the shards of {name} are not the whole of it; {self.instead}")
