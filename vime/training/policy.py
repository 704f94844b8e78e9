"""The models of training: transformers models, from packed tokens to log-probabilities or values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import GENERATION_CONFIG_NAME

from vime.training import packed
from vime.training.kernels import Kernels, apply_liger
from vime.training.logprobs import chunked_logprobs
from vime.training.mesh import CopyIn, Mesh, broadcast_json, parts_in
from vime.training.parallel import decoder_layers
from vime.training.routing import Routing
from vime.training.selfcheck import ModelRefused, load_config, rope_limit, self_check
from vime.training.stored import present_in_turn, read_buffers, stored_weights


def hidden_states(
    decoder: nn.Module, batch: packed.Packed, mesh: Mesh | None, limit: int | None, routing: Routing | None = None
) -> torch.Tensor:
    """The last hidden states [n, d] from which this rank's n response tokens of a packed micro-batch are predicted.

    ``limit`` is the decoder's ``rope_limit``; ModelRefused for a sequence beyond it.
    """
    if limit is not None and (length := int(batch.position_ids.max()) + 1) > limit:
        raise ModelRefused(
            f"a sequence has {length} tokens; beyond {limit} the model's rotary embedding would change for all sequences "
            f"packed with it. Set vllm.max-model-len = {limit}, or batch.max_length of given conversations"
        )
    extra = {} if routing is None else {"routing": routing}
    output = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        layout=batch.layout,
        context=mesh.context_group if mesh and mesh.contexts > 1 else None,
        **extra,
    )
    hidden = output.last_hidden_state[0]
    if mesh and mesh.tensors > 1:  # each tensor rank goes on with other positions
        hidden = CopyIn.apply(hidden, mesh.tensor_group)
    return hidden[batch.sources]


class Policy(nn.Module):
    """``model`` is the transformers model, with its own parameter names; forward gives what the losses need."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.mesh: Mesh | None = None  # until it is spread over ranks
        self.rope_limit = rope_limit(model)
        self.compiled = False

    @property
    def decoder(self) -> nn.Module:
        return self.model.get_decoder()

    def forward(
        self, batch: packed.Packed, temperature: float, chunk: int, routing: Routing | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (float32 [N]) of a packed micro-batch's N response tokens.

        ``routing`` is for models whose routers heed it (``routing.install``).
        """
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        hidden = hidden_states(self.decoder, batch, self.mesh, self.rope_limit, routing)
        weight, bias = parts_in(self.mesh, head.weight, getattr(head, "bias", None))
        temperature *= getattr(config, "logits_scaling", None) or 1.0  # Granite divides logits by it
        temperature /= getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies by it
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        output = chunked_logprobs(hidden, weight, bias, batch.targets, temperature, chunk, softcap, self.compiled)
        logprobs, entropies = (batch.gather(values, self.mesh) for values in output)
        return logprobs, entropies

    def logits(self, batch: packed.Packed) -> torch.Tensor:
        """The logits [N, V], float32, of which ``forward`` takes the chosen tokens' log-probabilities, before the temperature. On
        one rank of a row alone."""
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        hidden = hidden_states(self.decoder, batch, self.mesh, self.rope_limit)
        logits = linear(hidden, head.weight, getattr(head, "bias", None)).float()
        logits = (
            logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        return (logits / softcap).tanh() * softcap if softcap else logits


class Critic(nn.Module):
    """The decoder of a transformers model with a scalar head, which starts from zero; also a reward model. The head has no
    bias, as those of transformers' sequence-classification models."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: nn.Module = model.get_decoder()
        self.compiled = False
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        self.mesh: Mesh | None = None  # until it is spread over ranks
        self.rope_limit = rope_limit(model)

    @property
    def decoder(self) -> nn.Module:
        return self.model

    def forward(self, batch: packed.Packed) -> torch.Tensor:
        """Value (float32 [N]) of the state before each of a packed micro-batch's N response tokens."""
        hidden = hidden_states(self.model, batch, self.mesh, self.rope_limit)
        values = linear(hidden, *parts_in(self.mesh, self.head.weight)).float().sum(-1)
        return batch.gather(values, self.mesh)


def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = Kernels(),  # noqa: B008
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING,
) -> PreTrainedModel:
    """The folder's model, by the ``classes`` of its kind, with packed attention and without dropout. Its parameters are not
    read yet (``stored``): ``parallelize`` reads what each rank holds.

    ModelRefused names what the engine cannot do. Collective: rank 0 checks for all.
    """
    config = load_config(folder)
    if type(config) not in classes:
        raise ModelRefused(
            f"{folder}: transformers has no model of the kind that is asked for of type {config.model_type}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found: Any = classes[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=stored_weights(folder),
                dtype=dtype,
                attn_implementation=packed.NAME,
                output_loading_info=True,
            )
        except FileNotFoundError as error:
            raise ModelRefused(
                f"{folder} holds no {error}; weights are read from safetensors: save the model again with transformers' "
                "save_pretrained"
            ) from None
        except (KeyError, ValueError) as error:  # models with attention classes of their own look the name up
            raise ModelRefused(
                f"{folder}: {config.model_type} cannot be made with packed attention ({error})"
            ) from error
    model, loading = found
    if missing := sorted(loading["missing_keys"]):
        raise ModelRefused(
            f"{folder} lacks weights, which would be random: {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    read_buffers(model)
    if classes is MODEL_FOR_CAUSAL_LM_MAPPING:  # others have no log-probabilities to compare
        check_once(model, folder)
    if kernels.flash:
        model.set_attn_implementation(packed.FLASH)
    if kernels.liger:
        apply_liger(model)
    return model


def check_once(model: PreTrainedModel, folder: Path) -> None:
    """The self-check, on rank 0; ModelRefused on every rank."""
    fault = ""
    if dist.get_rank() == 0:
        policy = Policy(model)
        try:
            with present_in_turn(policy, decoder_layers(policy.decoder)):
                self_check(policy, folder)
        except ModelRefused as error:
            fault = str(error)
    if fault := broadcast_json(fault):
        raise ModelRefused(fault)


def load_critic(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = Kernels(),  # noqa: B008
) -> Critic:
    """A critic from a causal language model, or from a reward model with its head; ModelRefused as ``load_model``."""
    config = load_config(folder)
    if not (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        return Critic(load_model(folder, dtype, kernels))
    if config.num_labels != 1:
        raise ModelRefused(f"{folder} tells {config.num_labels} labels apart; a reward model has one (num_labels = 1)")
    model: Any = load_model(folder, dtype, kernels, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    critic = Critic(model)
    with torch.no_grad():
        critic.head.weight.copy_(model.score.weight.read())
    return critic


Trained = TypeVar("Trained", Policy, Critic)
