"""Check that a relabelled checkpoint is the same model, from the files that were written.

On a sample of MoE layers the old and the new router see the same random hidden states: the new router must choose the
renumbered experts that the old router chose, and each new expert must have the same bytes as the old one. The experts
are not computed: in any number format, equal bytes give equal results. The tables of hash-routed layers are compared
whole, at every layer.
"""

from dataclasses import dataclass

import numpy as np

from semmoe.checkpoint.directory import Checkpoint, config_count
from semmoe.checkpoint.layout import MoeLayer, find_moe_layers
from semmoe.checkpoint.shards import Progress, Stage, same_bytes
from semmoe.topology import Fingerprint

SAMPLED_LAYERS, SAMPLED_TOKENS = 3, 64
TIE = 1e-4  # router scores closer than this may be ordered either way by rounding


@dataclass(frozen=True)
class Verification:
    """What was checked. `ties`: tokens whose last chosen expert led by less than TIE, so that order may decide."""

    layers: list[int]  # indices of decoder layers
    tokens: int  # number that was routed, over all layers
    ties: int


@dataclass(frozen=True)
class Router:
    """One layer's router in float64."""

    weight: np.ndarray  # (E, H)
    bias: np.ndarray  # (E,)
    correction: np.ndarray | None  # (E,) added to scores for the choice only (DeepSeek-V3 and V4)
    scoring: str  # of a router with a correction: "sqrtsoftplus" in DeepSeek-V4, else the sigmoid
    top_k: int
    num_groups: int
    top_groups: int

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """(T, H) -> (T, E): the scores by which experts are chosen; the highest win."""
        logits = hidden @ self.weight.T + self.bias
        if self.correction is None:
            return logits
        if self.scoring == "sqrtsoftplus":
            return np.sqrt(np.logaddexp(0, logits)) + self.correction
        return 1 / (1 + np.exp(-logits)) + self.correction

    def choose(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(T, E) -> chosen (T, E) bool, and (T,) the margin of the last chosen expert over the best one left out."""
        tokens, experts = scores.shape
        by_group = scores.reshape(tokens, self.num_groups, -1)
        best = 1 if self.correction is None else min(2, experts // self.num_groups)
        group_scores = np.sort(by_group, axis=2)[:, :, -best:].sum(axis=2)
        kept, group_margin = _best(group_scores, self.top_groups)
        limited = np.where(kept[:, :, None], by_group, -np.inf).reshape(tokens, experts)
        chosen, margin = _best(limited, self.top_k)
        return chosen, np.minimum(margin, group_margin)


def _best(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` highest of each row as a mask, and by how much the last of them leads the next one."""
    order = np.argsort(-scores, axis=1, kind="stable")
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order[:, :count], True, axis=1)
    if count == scores.shape[1]:
        return mask, np.full(len(scores), np.inf)
    ranked = np.take_along_axis(scores, order, axis=1)
    return mask, ranked[:, count - 1] - ranked[:, count]


def verify(old: Checkpoint, new: Checkpoint, orders: np.ndarray, f: Fingerprint, stage: Stage) -> Verification:
    """Compare `new` with `old` renumbered by `orders` (L, E); raises RuntimeError at the first difference.

    Name, type and shape are compared for every tensor, routing and experts for a sample of layers.
    """
    layers = _same_layers(old, new, f)
    for layer, order in zip(layers, orders, strict=True):
        _check_tables(old, new, layer, order)
    sample = sorted({0, len(layers) // 2, len(layers) - 1} if len(layers) > SAMPLED_LAYERS + 1 else range(len(layers)))
    names = [name for i in sample for name in [*layers[i].by_row, *layers[i].by_name]]
    progress = stage("verifying", sum(old.tensors[name].nbytes for name in names))
    ties = 0
    for i in sample:
        ties += _check_routing(old, new, layers[i], orders[i], f)
        _check_experts(old, new, layers[i], orders[i], progress)
    return Verification([layers[i].index for i in sample], SAMPLED_TOKENS * len(sample), ties)


def _same_layers(old: Checkpoint, new: Checkpoint, f: Fingerprint) -> list[MoeLayer]:
    """The MoE layers, which both checkpoints must have alike."""
    layers = find_moe_layers(old, f.num_experts)
    same = layers == find_moe_layers(new, f.num_experts)
    _expect(same and old.tensors.keys() == new.tensors.keys(), "the tensors have other names")
    _expect(old.config == new.config, "config.json differs")
    renumbered = {name for layer in layers for name in layer.by_name}
    for name, tensor in old.tensors.items():
        kind = (tensor.dtype, tensor.shape) == (new.tensors[name].dtype, new.tensors[name].shape)
        _expect(kind or name in renumbered, f"{name} has another type or shape")
    return layers


def _check_tables(old: Checkpoint, new: Checkpoint, layer: MoeLayer, order: np.ndarray) -> None:
    """Every new number in a table must stand for the old expert."""
    for name in layer.tables:
        numbers = new.tensors[name].values()
        inside = bool(((numbers >= 0) & (numbers < len(order))).all())
        same = inside and np.array_equal(order[numbers], old.tensors[name].values())
        _expect(same, f"{name} sends token ids to other experts")


def _check_routing(old: Checkpoint, new: Checkpoint, layer: MoeLayer, order: np.ndarray, f: Fingerprint) -> int:
    """Route the same hidden states by both routers; returns the number of ties."""
    one, other = _router(old, layer, f), _router(new, layer, f)
    hidden = np.random.default_rng(0).normal(size=(SAMPLED_TOKENS, one.weight.shape[1]))
    hidden /= np.sqrt(np.mean(hidden**2, axis=1, keepdims=True))  # the same scale as after RMS norm
    scores, new_scores = one.scores(hidden), other.scores(hidden)
    equal = np.allclose(new_scores, scores[:, order], rtol=1e-9, atol=1e-9, equal_nan=True)
    _expect(equal, f"the router of layer {layer.index} scores experts differently")
    chosen, margin = one.choose(scores)
    new_chosen, _ = other.choose(new_scores)
    clear = ~(margin < TIE)
    same = bool((new_chosen == chosen[:, order])[clear].all())
    _expect(same, f"the router of layer {layer.index} chooses other experts")
    return int((~clear).sum())


def _router(checkpoint: Checkpoint, layer: MoeLayer, f: Fingerprint) -> Router:
    config = checkpoint.config
    parts = {part: checkpoint.tensors[name].values() for part, name in layer.gate.items()}
    if config.get("scoring_func") == "sqrtsoftplus" and "bias" in parts:  # DeepSeek-V4's name for its correction
        parts["e_score_correction_bias"] = parts.pop("bias")
    return Router(
        weight=parts["weight"].reshape(f.num_experts, -1),
        bias=parts.get("bias", np.zeros(f.num_experts)),
        correction=parts.get("e_score_correction_bias"),
        scoring=str(config.get("scoring_func")),
        top_k=f.top_k,
        num_groups=f.num_groups,
        top_groups=min(config_count(config, "topk_group") or f.num_groups, f.num_groups),
    )


def _check_experts(old: Checkpoint, new: Checkpoint, layer: MoeLayer, order: np.ndarray, progress: Progress) -> None:
    """New expert p must have the bytes of old expert order[p], in every tensor that depends on expert numbers."""
    for p, e in enumerate(order.tolist()):
        for part in sorted(layer.parts.get(e, ())):
            name = layer.expert_tensor(p, part)
            same = same_bytes(old.tensors[layer.expert_tensor(e, part)], new.tensors[name], progress)
            _expect(same, f"{name} is not the old expert {e}")
        for name in layer.by_row:
            same = same_bytes(old.tensors[name].row(e), new.tensors[name].row(p), progress)
            _expect(same, f"row {p} of {name} is not the old expert {e}")


def _expect(condition: bool, difference: str) -> None:
    if not condition:
        raise RuntimeError(f"the relabelled checkpoint is not the same model, and is not kept: {difference}")
