"""Ask a layer's router one step ahead: on the residual stream as the MoE layer before leaves it, before attention.

What it names is most of what it will choose once attention has added its part. The rank that owns a token's row asks,
at the end of a layer, and the answers travel with the all-gather that ends the layer anyway. Every rank of the group
therefore has the same answers by construction, whatever it runs on, and each token is asked for once.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from semmoe.runtime.shuffler import by_weight

# Norm and router of a layer: rows (n, H) -> expert ids (n, W) and their weights (n, W), in any order.
Ask = Callable[[Tensor], tuple[Tensor, Tensor]]


class Lookahead:
    """The routers of all MoE layers but the first, each asked for `width` experts, W."""

    def __init__(self, asks: Sequence[Ask], width: int) -> None:
        self._asks, self._width = asks, width

    @torch.no_grad()
    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """(n, W) ids by falling weight for the MoE layer after `layer`, from the stream (n, H) that `layer` leaves.

        (n, 0) after the last layer.
        """
        if layer >= len(self._asks):
            return torch.empty((len(rows), 0), dtype=torch.int64, device=rows.device)
        if len(rows) == 0:
            return torch.empty((0, self._width), dtype=torch.int64, device=rows.device)
        ids, weights = self._asks[layer](rows)
        return by_weight(ids, weights, torch.int64)


NO_LOOKAHEAD = Lookahead((), 0)


def lookahead_over(layers: Sequence[Any], planes: int, top_k: int, ask_of: Callable[[Any, int], Ask]) -> Lookahead:
    """What asks the routers of `layers`, all of a model with experts, but the first; planes 0: nothing does.

    ask_of: the norm and router of a layer, asked for so many experts.
    """
    width = planes * top_k
    return Lookahead([ask_of(layer, width) for layer in layers[1:]], width) if planes else NO_LOOKAHEAD


def logits_of(gate: Any, rows: Tensor) -> Tensor:
    """(n, E): what an engine's gate computes; some return a bias beside it."""
    out = gate(rows)
    return out[0] if isinstance(out, tuple) else out


def gate_of(block: Any) -> Any:
    """The module that computes router logits in an engine's MoE block. Raises ValueError if it is not known."""
    gate = getattr(block, "gate", None)
    gate = gate if gate is not None else getattr(block, "router", None)
    if gate is None:
        raise ValueError(
            f"{type(block).__name__} has no gate that can be asked ahead of time: profile or solve without --lookahead"
        )
    return gate


def asking_for(router: Any, width: int) -> Any:
    """The same router with the same weights, which chooses `width` experts; hooks on the router do not see it."""
    asked = copy.copy(router)
    for name in [name for name in vars(router) if name.startswith(("_forward_", "_backward_")) and "hooks" in name]:
        setattr(asked, name, OrderedDict())
    asked.top_k = width
    return asked
