"""Mixture of experts: which experts a token goes to, forced or noted, and how evenly experts are used.

transformers declares of every model which modules are its routers (``_can_record_outputs["router_logits"]``). Inside their
forward, ``torch.topk`` over the experts is answered with the given experts and these experts' present scores: what follows,
gradients included, is the router's own. No line here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from vime.training.mesh import Mesh

TOPK = (torch.topk, torch.Tensor.topk)


class RoutingError(Exception):
    """Experts cannot be forced or noted; the message says of what."""


class Routing:
    """How a row of T tokens is routed in one forward pass, by R routers that each choose k of E experts.

    ``forced`` [T, R, k] is what the routers choose, where it is given. The pass fills in, by router, what they ``chose``
    [T, k] and their ``logits`` [T, E], with gradient. Tokens stand in packed order; of a row that ranks share, each has its
    own T. It travels with the arguments of the
    layers, so that layers recomputed in the backward pass route as in the forward pass; a data class FSDP would copy.
    """

    def __init__(self, forced: torch.Tensor | None = None) -> None:
        self.forced = forced
        self.chose: dict[int, torch.Tensor] = {}
        self.logits: dict[int, torch.Tensor] = {}

    def experts(self) -> torch.Tensor:
        """What all routers chose, [T, R, k], as it can be forced on another pass."""
        return torch.stack([self.chose[router] for router in sorted(self.chose)], dim=1).to(torch.int16)


@dataclass(frozen=True)
class Routers:
    """A model's routers: the decoder ``layers`` that have one, of ``depth`` layers in all, and their k (``top_k``) and E."""

    layers: list[int]
    depth: int
    top_k: int
    experts: int

    def of_server(self, name: str, experts: np.ndarray | None) -> np.ndarray:
        """A sample's experts as a server tells them, [tokens, depth, k], at the layers with a router, [tokens, R, k]."""
        found = "none" if experts is None else f"{experts.shape[1]} layers, {experts.shape[2]} a token"
        if experts is None or experts.shape[1:] != (self.depth, self.top_k):
            raise RoutingError(
                f"sample {name} was stored with routed experts: {found}; the policy has {self.depth} layers, {self.top_k} a "
                'token. Let the server serve the policy, or set algorithm.router_replay to "none" or "trainer"'
            )
        chosen = experts[:, self.layers].astype(np.int16)
        if chosen.size and chosen.max() >= self.experts:
            raise RoutingError(f"sample {name} was routed to expert {chosen.max()}; the policy has {self.experts}")
        return chosen


class Choice(TorchFunctionMode):
    """Answers a router's top-k over its experts with ``forced`` [T, k], if given; ``chosen`` is what came of it."""

    def __init__(self, router: nn.Module, forced: torch.Tensor | None) -> None:
        super().__init__()
        self.wanted, self.forced = (router.top_k, router.num_experts), forced
        self.chosen: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in TOPK or not self.over_experts(*args, **kwargs):
            return function(*args, **kwargs)
        scores = args[0]
        if self.forced is None:
            result = function(*args, **kwargs)
        else:
            experts = self.forced.long()
            result = torch.return_types.topk((scores.gather(-1, experts), experts))  # type: ignore[attr-defined]
        self.chosen = result.indices
        return result

    def over_experts(self, scores: torch.Tensor, k: int, *_: Any, **__: Any) -> bool:
        """Whether this top-k chooses experts: some routers choose groups of experts first."""
        return scores.ndim == 2 and (k, scores.shape[-1]) == self.wanted


def install(model: PreTrainedModel) -> Routers:
    """Makes the model's routers heed a ``routing`` among the keyword arguments of its decoder; without one nothing changes.

    RoutingError for a model without routers and for those whose routers it does not know how to reach.
    """
    decoder, name = model.get_decoder(), type(model).__name__
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        raise RoutingError(f"{name} declares no router: set algorithm.router_aux_coef = 0 and router_replay to none")
    found: list[tuple[int, Any]] = []
    for index, layer in enumerate(decoder.layers):
        routers: list[Any] = [module for module in layer.modules() if isinstance(module, kind)]
        if len(routers) > 1 or any(not hasattr(m, wanted) for m in routers for wanted in ("top_k", "num_experts")):
            raise RoutingError(f"{name}: layer {index} has routers ({kind.__name__}) whose experts cannot be forced")
        for router in routers:
            _listen(layer, router, len(found), getattr(recorder, "index", 0))
            found.append((index, router))
    shapes = {(int(router.top_k), int(router.num_experts)) for _, router in found}
    if len(shapes) != 1:
        raise RoutingError(f"{name} has routers of {len(shapes)} shapes (top_k, experts): {sorted(shapes)}; need one")
    top_k, experts = shapes.pop()
    return Routers([index for index, _ in found], len(decoder.layers), top_k, experts)


def _listen(layer: Any, router: nn.Module, number: int, index: int) -> None:
    """Router ``number`` heeds its layer's ``routing``; place ``index`` of its output holds its logits."""
    forward: Callable[..., Any] = router.forward
    present: list[Routing | None] = [None]

    def receive(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        present[0] = kwargs.get("routing")

    def route(*args: Any, **kwargs: Any) -> Any:
        routing = present[0]
        if routing is None:
            return forward(*args, **kwargs)
        with Choice(router, None if routing.forced is None else routing.forced[:, number]) as choice:
            output = forward(*args, **kwargs)
        if choice.chosen is None:
            raise RoutingError(f"{type(router).__name__} chooses its experts by other means than torch.topk")
        routing.chose.setdefault(number, choice.chosen)  # not again when the backward pass recomputes the layer
        routing.logits.setdefault(number, output[index])
        return output

    layer.register_forward_pre_hook(receive, with_kwargs=True)
    router.forward = route  # type: ignore[method-assign]


@dataclass(frozen=True)
class Balance:
    """What the load-balancing loss of T tokens, a row or a rank's part of it, needs of the whole update.

    ``predicts`` [T]: how many of the update's ``trained`` tokens each position predicts. ``share`` [R, E]: the fraction f of
    the assignments of trained tokens to experts that each expert has, by router.
    """

    predicts: torch.Tensor
    share: torch.Tensor
    trained: float

    def loss(self, routing: Routing) -> torch.Tensor:
        """E sum_e f_e mean_t p_e(t), averaged over routers, p the softmax of a router's logits; 1 where all is even.

        Switch Transformer (arXiv 2101.03961), equation 4, for k experts a token, with f over the whole update (global-batch
        balance, arXiv 2501.11873): linear in tokens, so this part is added to those of others.
        """
        routers, experts = self.share.shape
        parts = [
            torch.softmax(routing.logits[router].float(), dim=-1) @ self.share[router].float()
            for router in range(routers)
        ]
        return (torch.stack(parts) @ self.predicts).sum() * experts / (routers * self.trained)

    def metrics(self) -> dict[str, float]:
        """The most and the least used expert's load over the mean load, averaged over routers."""
        load = self.share * self.share.shape[1]
        return {"router_load_max": load.amax(-1).mean().item(), "router_load_min": load.amin(-1).mean().item()}


def balances(rows: Sequence[tuple[torch.Tensor, torch.Tensor]], experts: int, mesh: Mesh) -> list[Balance]:
    """Of each row of one update, or this rank's part of it: given are, for its T positions, how many trained tokens they
    predict [T] and what was chosen there, of ``experts`` experts, [T, R, k]. Collective: shares are over all ranks' rows."""
    routers, k = rows[0][1].shape[1:]
    chosen = torch.zeros(routers, experts, dtype=torch.double, device=rows[0][0].device)
    for predicts, choice in rows:
        spread = predicts.double()[:, None].expand(-1, k).flatten()
        for router in range(routers):
            chosen[router].index_add_(0, choice[:, router].long().flatten(), spread)
    for group in (mesh.context_group, mesh.data_group):
        dist.all_reduce(chosen, group=group)
    assignments = chosen.sum(-1, keepdim=True).clamp(min=1.0)
    return [Balance(predicts, chosen / assignments, assignments[0].item() / k) for predicts, _ in rows]
