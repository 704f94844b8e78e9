"""How much memory training takes: predicted before a run, from one micro-batch that never is computed, and measured in it.

What lies still (weights, gradients, moments) follows from the parameters' sizes. What comes and goes is found by running the
real forward and backward pass of the whole model on tensors without data (torch's FakeTensorMode), with every allocation and
release counted. So it holds for any architecture, and no formula of activations stands here. What FSDP2 allocates is added.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from vime.config.sections import Config
from vime.training import packed
from vime.training.checkpointing import ATTENTION, checkpointed
from vime.training.flash import Runs
from vime.training.kernels import choose
from vime.training.parallel import decoder_layers
from vime.training.policy import Policy

BYTES = {"float32": 4, "bfloat16": 2}
REDUCED = 4  # bytes of a gradient that is reduced over ranks, in float32
MOMENTS = {"adamw_8bit": 2.03, "adamw_fp8": 2.03}  # bytes of both, with the scales of their blocks
CUBLAS = 64 << 20  # bytes of its workspaces on a GPU: one each for the threads of the forward and the backward pass
GIB = 1 << 30
FUSED = ("aten::_to_copy", "aten::cat", "aten::clone", "aten::mean")  # pointwise too, or as cheap, for a compiler


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside it, by the phase that they were made in, and their greatest sum.

    ``fused``: activations as where layers are compiled. What pointwise operations make is not kept but computed again, from
    what they were given, which then is kept in its place; but for what a layer hands on and attention and matrix products take.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.phase = "activations"
        self.phases: dict[int, str] = {}  # of each storage that lives
        self.sources: dict[
            int, dict[int, torch.UntypedStorage]
        ] = {}  # of what is computed again, while it would be kept
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name
        fused = self.fused and self.phase == "activations"
        if fused and any(word in name for word in ATTENTION):
            for tensor in args[:3]:
                self.note(tensor)
        elif fused and (torch.Tag.pointwise in operator.tags or name in FUSED):
            self.derive(result, tree_leaves((args, kwargs)))
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        return result

    def derive(self, result: torch.Tensor, given: list[Any]) -> None:
        """Keeps what ``result`` can be computed from for as long as ``result`` itself would be."""
        storage = result.untyped_storage()
        key = storage._cdata
        if key in self.phases or key in self.sources:
            return
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                of = tensor.untyped_storage()
                found |= {of._cdata: of} if of._cdata in self.phases else self.sources.get(of._cdata, {})
        self.sources[key] = found
        weakref.finalize(storage, self.sources.pop, key, None)

    def note(self, tensor: torch.Tensor, phase: str | None = None) -> None:
        """Begins to count a tensor's storage; one that is known already moves to ``phase``, if that is given."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.sources.pop(key, None)
        if (known := self.phases.get(key)) is None:
            weakref.finalize(storage, self._released, key, size)
        elif phase is None:
            return
        else:
            self.live[known] -= size
        self.phases[key] = phase or self.phase
        self.live[self.phases[key]] += size
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _released(self, key: int, size: int) -> None:
        self.live[self.phases.pop(key)] -= size


@dataclasses.dataclass(frozen=True)
class Pass:
    """What lives, in bytes, at the peak of a micro-batch's forward and backward pass."""

    activations: int
    logits: int
    gradients: int


def row_of(tokens: int, length: int) -> packed.Packed:
    """A packed row of ``tokens`` tokens: responses of ``length`` tokens, each to a prompt of one token."""
    length = min(length, tokens)
    return packed.pack([([0], [[0] * length]) for _ in range(max(1, tokens // length))])


def moved(value: Any, device: torch.device, data: bool = True) -> Any:
    """A tensor, or a data class of tensors and others, on ``device``; without ``data`` under FakeTensorMode only its shape."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if data else torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, Runs):
        return Runs(value.groups, device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: moved(getattr(value, field.name), device, data) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not dataclasses.is_dataclass(value):
        return []
    return [tensor for field in dataclasses.fields(value) for tensor in tensors_of(getattr(value, field.name))]


def measured_pass(
    policy: Policy, row: packed.Packed, temperature: float, chunk: int, entropy: bool, fused: bool = False
) -> Pass:
    """Runs ``policy`` forward and backward, as training does, and counts.

    As under FSDP a layer's gradients go once the layer is done, those of the rest at the end.
    """
    layer_of: dict[torch.Tensor, Any] = {
        parameter: layer for layer in decoder_layers(policy.decoder) for parameter in layer.parameters()
    }
    counted = LiveBytes(fused)
    for tensor in [*policy.parameters(), *policy.buffers(), *tensors_of(row)]:
        counted.phases[tensor.untyped_storage()._cdata] = "given"
    present: list[Any] = [None]  # the layer that gradients come from

    def arrived(parameter: torch.Tensor) -> None:
        layer = layer_of.get(parameter)
        if layer is not present[0] and present[0] is not None:
            for held in present[0].parameters():
                held.grad = None
        present[0] = layer
        counted.note(parameter.grad, "gradients")  # type: ignore[arg-type]

    def enter(phase: str) -> None:
        counted.phase = phase

    def leave_decoder(module: Any, inputs: Any, output: Any) -> None:
        enter("logits")
        output.last_hidden_state.register_hook(lambda _: enter("activations"))

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in policy.parameters() if p.requires_grad]
    hooks.append(policy.decoder.register_forward_hook(leave_decoder))
    for layer in decoder_layers(policy.decoder):
        hooks.append(layer.register_forward_hook(lambda module, inputs, output: counted.note(output)))
    with counted:
        logprobs, entropies = policy(row, temperature, chunk)
        (logprobs.sum() + entropies.sum() if entropy else logprobs.sum()).backward()
    for hook in hooks:
        hook.remove()
    return Pass(counted.peak["activations"], counted.peak["logits"], counted.peak["gradients"])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Parameters of a model: in all, in its largest decoder layer, outside of its layers, and those that learn."""

    all: int
    layer: int
    rest: int
    learning: int


def sizes(module: Policy) -> Sizes:
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(module.decoder)]
    total = sum(p.numel() for p in module.parameters())
    return Sizes(total, max(layers), total - sum(layers), total)


def tensor_part(config: Any, tensors: int) -> Any:
    """The model's configuration with the sizes of one tensor rank: heads and inner features are split."""
    text = config.get_text_config()
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name) // tensors)
    return config


def shape_only(folder: str, tensors: int, dtype: torch.dtype = torch.float32, attention: str = packed.NAME) -> Policy:
    """One tensor rank's part of the folder's model, random; under FakeTensorMode it takes no memory."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if tensors > 1:
        config = tensor_part(config, tensors)
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)).train()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One rank's memory at its peak, in bytes by part, and the moment at which that is."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def predict(config: Config, device: torch.device) -> Prediction:
    """The peak of one rank on ``device``. Responses are taken to have as many tokens as they may and prompts one.

    Several micro-batches a step are assumed: the gradients of those before lie beside. Context ranks have a row's tokens
    split, and give some heads of all of them to attention: as much as a row of their own.
    """
    section, kernels = config.trainer, choose(config, device)
    attention = packed.FLASH if kernels.flash else packed.NAME
    shards = section.shards * section.context_parallel
    row = row_of(section.tokens_per_micro_batch, config.rollout.max_tokens)
    row = dataclasses.replace(  # tensor ranks deal out the positions of the output head
        row, sources=row.sources[:: section.tensor_parallel], targets=row.targets[:: section.tensor_parallel]
    )
    with FakeTensorMode(), torch.device(device):
        policy = shape_only(config.model.path, section.tensor_parallel, getattr(torch, config.model.dtype), attention)
        if (
            config.lora.rank
        ):  # an adapter, itself too small to count, needs what the layers' matrices would for their gradients
            for embedding in (policy.model.get_input_embeddings(), policy.model.get_output_embeddings()):
                embedding.requires_grad_(False)
        layers = decoder_layers(policy.decoder)
        for index, layer in enumerate(layers):
            layers[index] = checkpointed(layer, section.activation_checkpointing)
        entropy = config.algorithm.entropy_coef > 0 or config.algorithm.entropy_target is not None
        one = measured_pass(
            policy,
            moved(row, device, data=False),
            config.rollout.temperature,
            section.logprob_chunk,
            entropy,
            fused=kernels.compile and section.activation_checkpointing == "none",
        )
        size, others = sizes(policy), other_models(config, shards)
    if config.lora.rank:
        size = dataclasses.replace(size, learning=0)
    if device.type == "cuda":
        others += CUBLAS
    return max(
        (
            Prediction(moment, {"other models, workspaces": others, **parts})
            for moment, parts in moments_of(config, size, one, shards).items()
        ),
        key=lambda prediction: prediction.total,
    )


def static(config: Config, size: Sizes, shards: int) -> dict[str, int]:
    """Bytes of what lies on one of ``shards`` ranks between steps, wherever it lies. Beside an adapter the model has the dtype
    of the passes."""
    section = config.trainer
    master = BYTES[section.master_dtype]
    frozen = BYTES[config.model.dtype] * (size.all - size.learning)
    return {
        "parameters": (master * size.learning + frozen) // shards,
        "gradients": master * size.learning // shards,
        "optimizer state": int(MOMENTS.get(section.optimizer, 2 * master) * size.learning / shards),
    }


def moments_of(config: Config, size: Sizes, one: Pass, shards: int) -> dict[str, dict[str, int]]:
    """The moments that may be the peak, and the device's memory by part in each.

    FSDP2 holds whole, in the dtype of the passes: all outside the layers through both passes, the layer at work, and the next
    one on its way from other ranks; and the gradients of a layer on their way to them.
    """
    section, width, lying = config.trainer, BYTES[config.model.dtype], static(config, size, shards)
    if section.cpu_offload == "all":
        lying = dict.fromkeys(lying, 0)
    moments = lying.pop("optimizer state")
    between = 0 if section.cpu_offload == "optimizer" else moments
    reduced = REDUCED if size.learning == size.all else 0  # of an adapter: next to nothing
    layers = (1 if shards == 1 else 2) * width * size.layer + reduced * size.layer
    whole = "unsharded parameters and gradients"
    return {
        "the backward pass": {
            **lying,
            "optimizer state": between,
            whole: width * size.rest + layers + one.gradients,
            "activations": one.activations,
            "logits chunk": one.logits,
        },
        "the reduction of gradients": {
            **lying,
            "optimizer state": between,
            whole: width * size.rest + reduced * (size.rest + size.rest // shards),
        },
        "the optimizer step": {**lying, "optimizer state": moments},
    }


def other_models(config: Config, shards: int) -> int:
    """Bytes of the models beside the policy: critic, reference, teacher."""
    section, width, total = config.trainer, BYTES[config.model.dtype], 0
    tensors, offloaded = section.tensor_parallel, section.cpu_offload == "all"
    asked = [config.teacher.path] if config.teacher.path else []
    if config.needs_reference and not config.reference.url:
        path = config.reference.path or config.model.path
        asked += (
            [] if config.lora.rank and path == config.model.path else [path]
        )  # beside an adapter it is there already
    for folder in asked:  # what is outside of the layers stays whole after a forward pass
        size = sizes(shape_only(folder, tensors))
        total += width * size.rest + (0 if offloaded else width * size.all // shards)
    if config.algorithm.advantage == "gae":
        critic = shape_only(config.critic.path or config.model.path, tensors)
        size, head = sizes(critic), critic.model.get_output_embeddings().weight
        if head is not critic.model.get_input_embeddings().weight:
            rest = {name: getattr(size, name) - head.numel() for name in ("all", "learning", "rest")}
            size = dataclasses.replace(size, **rest)
        held = static(config, size, shards)
        if section.cpu_offload == "optimizer":
            del held["optimizer state"]
        total += width * size.rest + (0 if offloaded else sum(held.values()))
    return total


# Measured


def device_memory(device: torch.device) -> int:
    """Bytes of memory that there are: the GPU's, or the host's within its control group and address space limits."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and (text := group.read_text().strip()) != "max":
        limits.append(int(text))
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(space)
    return min(limits)


def allocated(device: torch.device) -> int:
    """Bytes in use: a GPU's tensors, or all of this process in the host's memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes in use since ``reset_peak``, counted as by ``allocated``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (switch := Path("/proc/self/clear_refs")).exists():  # Linux: 5 resets VmHWM
        try:
            switch.write_text("5")
        except OSError:
            pass  # some containers forbid it: the peak is then that of the process's whole life


def _resident(field: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux: only the peak is told
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def table(config: Config, device: torch.device) -> str:
    """What ``predict`` says, in lines of text, against the device's memory; or why there is no prediction."""
    try:
        prediction, total = predict(config, device), device_memory(device)
    except Exception as error:  # a model may do what needs data, or what no tensor without data can
        return f"memory cannot be predicted for this model: {type(error).__name__}: {error}"
    rows = [(name, size) for name, size in prediction.parts.items() if size] + [("total", prediction.total)]
    lines = [f"predicted memory of each of {config.trainer.ranks} trainer ranks at its peak, in {prediction.moment}:"]
    lines += [f"  {name:<36}{size / GIB:9.3f} GiB  {size / total:6.1%}" for name, size in rows]
    return "\n".join([*lines, f"  {'the device has':<36}{total / GIB:9.3f} GiB"])
