"""Check that a relabelled checkpoint is the same model, from the files that were written.

Each new expert must have the bytes of the old one, and its row of the router the bytes of the old row. That is enough:
equal rows give equal scores in any number format, so the new router chooses the renumbered experts, and a plan that
splits a gate group is refused before anything is written. Routers and the tables of hash-routed layers are compared at
every layer, experts on a sample of layers.
"""

import numpy as np

from semmoe.checkpoint.directory import Checkpoint
from semmoe.checkpoint.layout import MoeLayer, find_moe_layers
from semmoe.checkpoint.shards import Stage, Tensor, same_bytes

SAMPLED_LAYERS = 3


def verify(old: Checkpoint, new: Checkpoint, orders: np.ndarray, stage: Stage) -> list[int]:
    """Compare `new` with `old` renumbered by `orders` (L, E); raises RuntimeError at the first difference.

    Returns the decoder layers whose experts were compared.
    """
    layers = _same_layers(old, new, orders.shape[1])
    last = len(layers) - 1
    sample = sorted({0, len(layers) // 2, last} if last > SAMPLED_LAYERS else range(len(layers)))
    pairs: list[tuple[str, Tensor, Tensor]] = []  # the error if they differ, the old piece, the new one
    for i, (layer, order) in enumerate(zip(layers, orders, strict=True)):
        _check_tables(old, new, layer, order)
        for p, e in enumerate(order.tolist()):
            expected = layer.pieces(old.tensors, e, i in sample)
            for (name, piece), (_, before) in zip(layer.pieces(new.tensors, p, i in sample), expected, strict=True):
                pairs.append((f"{name} is not the old expert {e}", before, piece))
    progress = stage("verifying", sum(piece.nbytes for _, _, piece in pairs))
    for difference, before, piece in pairs:
        _expect(same_bytes(before, piece, progress), difference)
    return [layers[i].index for i in sample]


def _same_layers(old: Checkpoint, new: Checkpoint, num_experts: int) -> list[MoeLayer]:
    """The MoE layers, which must be the same in both checkpoints, as must name, type and shape of every tensor."""
    layers = find_moe_layers(old, num_experts)
    same = layers == find_moe_layers(new, num_experts)
    _expect(same and old.tensors.keys() == new.tensors.keys(), "the tensors have other names")
    _expect(old.config == new.config, "config.json differs")
    renumbered = {
        layer.expert_tensor(e, part) for layer in layers for e, parts in layer.parts.items() for part in parts
    }
    for name in old.tensors.keys() - renumbered:
        a, b = old.tensors[name], new.tensors[name]
        _expect((a.dtype, a.shape) == (b.dtype, b.shape), f"{name} has another type or shape")
    return layers


def _check_tables(old: Checkpoint, new: Checkpoint, layer: MoeLayer, order: np.ndarray) -> None:
    """Every new number in a table must stand for the old expert."""
    for name in layer.tables:
        numbers = new.tensors[name].values()
        inside = bool(((numbers >= 0) & (numbers < len(order))).all())
        same = inside and np.array_equal(order[numbers], old.tensors[name].values())
        _expect(same, f"{name} sends token ids to other experts")


def _expect(condition: bool, difference: str) -> None:
    if not condition:
        raise RuntimeError(f"the relabelled checkpoint is not the same model, and is not kept: {difference}")
