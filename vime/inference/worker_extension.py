"""What runs inside a vLLM worker: a weight-transfer backend that reads safetensors from a memory-backed folder.

Named by ``--worker-extension-cls``, imported by the worker before it loads the model; importing it registers the backend
``vime_files``, which vLLM's own weight-update endpoints then drive. Nothing of vLLM is patched.

An update is checked whole, name and shape of every tensor, against the model folder that the server was started
with, before the running model is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "vime_files"


class WeightUpdateRefused(Exception):
    """The update does not fit the model; the running model is untouched."""


@dataclass
class FilesInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """``path``: a folder with the safetensors files of one whole version."""

    path: str


def headers(folder: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a folder by name; raises WeightUpdateRefused for files that cannot be read."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightUpdateRefused(f"{folder} holds no safetensors files")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightUpdateRefused(f"{file} cannot be read: {error}") from None
    return found


def check(update: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises WeightUpdateRefused naming the first tensors that are missing, unknown or of another shape."""
    faults = [f"{name} is missing" for name in sorted(expected.keys() - update.keys())]
    faults += [f"{name} is unknown" for name in sorted(update.keys() - expected.keys())]
    faults += [
        f"{name} has shape {update[name]}, the model {expected[name]}"
        for name in sorted(update.keys() & expected.keys())
        if update[name] != expected[name]
    ]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise WeightUpdateRefused(f"the weights do not fit the model: {'; '.join(faults[:3])}{more}")


def tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def forget_packed_experts(model: Any) -> None:
    """The CPU build packs experts only while no kernel exists: a second load would be copied in unpacked."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: Any) -> None:
    """The CPU build's output head keeps a packed copy, which a layerwise reload does not refresh when it is tied."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(module).__name__ == "ParallelLMHead" and method is not None:
            method.process_weights_after_loading(module)


def open_for_copies(model: Any) -> None:
    """gpt-oss's loader copies sinks and experts straight into the parameters, past the wrapped loaders that a layerwise reload
    counts: into meta tensors, where they would be lost. Makes those parameters real and their layers count as loaded."""
    if "GptOss" not in type(model).__name__:
        return
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, materialize_layer

    for layer in model.modules():
        if {"sinks", "w13_weight"} & dict(layer.named_parameters(recurse=False)).keys():
            info = get_layerwise_info(layer)
            materialize_layer(layer, info)
            info.load_numel = 1


class FilesEngine(WeightTransferEngine[FilesInit, FilesUpdate]):
    """Loads each version from the files of its own folder."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        pass

    def start_weight_update(self) -> None:
        """Nothing yet: the model is opened for loading only once an update has been checked."""

    def receive_weights(self, update_info: FilesUpdate, *_: object) -> None:
        update = headers(update_info.path)
        source = self.model_config.model
        if Path(source).is_dir() and any(Path(source).glob("*.safetensors")):
            check(update, headers(source))
        if self.device.type == "cpu":
            forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        open_for_copies(self.model)
        model: Any = self.model
        model.load_weights(tensors(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*_: object, **__: object) -> None:
        """Abstract in vLLM 0.26; vime's trainer writes files and the driver makes the calls."""
        raise NotImplementedError("vime's driver sends the weights")


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FilesEngine)


class WorkerExtension:
    """Mixed into the worker by vLLM."""

    def seed_sampling(self, seed: int) -> None:
        """The tokens sampled from here on depend on the seed and on what is asked, no longer on what came before."""
        torch.manual_seed(seed)
