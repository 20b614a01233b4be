"""Layers whose router looks experts up by token id (`tid2eid` of DeepSeek-V4's first layers)."""

from dataclasses import dataclass

import numpy as np

from semmoe.bounds import check_range
from semmoe.topology import Fingerprint


@dataclass(frozen=True, kw_only=True)
class HashedLayers:
    """The experts of every token id at each of M layers; no such layer by default.

    Letters: M hash-routed layers, V token ids, K experts per token.
    """

    layers: np.ndarray  # (M,) int32, ascending: their indices among the MoE layers
    expert_ids: np.ndarray  # (M, V, K) uint8 or int16: logical experts, in no order

    def check(self, f: Fingerprint) -> None:
        """Raise ValueError unless the tables are those of a model with this fingerprint."""
        if self.layers.ndim != 1 or (np.diff(self.layers) <= 0).any():
            raise ValueError("hash-routed layers must be listed once each, in ascending order")
        check_range("hash-routed layer", self.layers, f.num_layers, "layers")
        shape = (len(self.layers), f.vocab_size, f.top_k) if len(self.layers) else NO_HASHED.expert_ids.shape
        if self.expert_ids.shape != shape:
            raise ValueError(f"tables of hash-routed layers have shape {self.expert_ids.shape}, expected {shape}")
        check_range("expert id", self.expert_ids, f.num_experts, "experts")

    def check_routing(self, token_ids: np.ndarray, expert_ids: np.ndarray) -> None:
        """Raise ValueError where tokens (T,) chose other experts (T, L, K) than the tables say."""
        for table, layer in zip(self.expert_ids, self.layers.tolist(), strict=True):
            said, chosen = np.sort(table[token_ids], axis=1), np.sort(expert_ids[:, layer], axis=1)
            wrong = np.flatnonzero((said != chosen).any(axis=1))
            if len(wrong):
                first = f"token id {token_ids[wrong[0]]} chose {chosen[wrong[0]].tolist()}"
                raise ValueError(f"hash-routed layer {layer}: {first}, its table says {said[wrong[0]].tolist()}")

    def table(self, layer: int) -> np.ndarray | None:
        """(V, K) the experts of every token id at a layer; None if the layer is not hash-routed."""
        found = np.flatnonzero(self.layers == layer)
        return self.expert_ids[found[0]] if len(found) else None


NO_HASHED = HashedLayers(layers=np.zeros(0, np.int32), expert_ids=np.zeros((0, 0, 0), np.uint8))
