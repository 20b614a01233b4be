"""Count the traffic of a rank (`metrics.Traffic`) on its device, without waiting for the device.

Copies are chosen by the operator that counts: `TrafficCounter.place`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semmoe.costs.metrics import Traffic
from semmoe.runtime import kernels
from semmoe.runtime.copies import RankCopies, place_experts


class Totals(NamedTuple):
    """What one rank has counted: the three kinds of rows that a dispatcher may send for the same tokens.

    Worked example, rank 0 of four on two nodes, a token whose experts are on ranks 0, 2, 2 and 3: three of its pairs
    are elsewhere, it has a row for two ranks, and one for the other node.
    """

    tokens: int
    pairs: list[int]  # (G,) by the rank that computes them
    rows: list[int]  # (G,) rows for each rank, one per (token, rank); 0 to itself
    node_rows: list[int]  # rows for each node, one per (token, node); 0 to its own


class TrafficCounter:
    """Totals of the tokens whose home is this rank. `count` and `place` may be captured in a CUDA graph.

    gathers: every row goes to every rank, whatever its experts. num_nodes: rank g is on node g // (size // num_nodes).
    """

    counts = True

    def __init__(
        self, size: int, rank: int, device: str | torch.device = "cpu", gathers: bool = False, num_nodes: int = 1
    ) -> None:
        assert size % num_nodes == 0, f"{size} ranks on {num_nodes} nodes"
        self.size, self.rank = size, rank
        self._gathers = gathers
        self._width = size // num_nodes  # ranks per node
        # By rank: pairs, then rows; rows by node; tokens.
        self._totals = torch.zeros(2 * size + num_nodes + 1, dtype=torch.int64, device=device)

    def count(self, expert_ids: Tensor, per_rank: int = 1, real: Tensor | None = None) -> None:
        """Count the rank that computes each chosen expert (n, K), of which every rank has `per_rank`; -1: none.

        real (1,): the number of leading rows that are tokens; None: all rows.
        """
        kernels.of(expert_ids.device).count(expert_ids, self._totals, self.size, per_rank, self._width, real)

    def place(self, copies: RankCopies, expert_ids: Tensor, per_rank: int, real: Tensor | None = None) -> Tensor:
        """Return what `copies.to_physical` does, counted as by `count`, in one operator."""
        return place_experts(
            expert_ids, copies.tables, copies.source, self._totals, self.size, per_rank, self._width, real
        )

    def totals(self) -> Totals:
        """Return the totals so far. Waits for the device."""
        found, size = self._totals.tolist(), self.size
        pairs, rows = found[:size], found[size : 2 * size]
        nodes, tokens = found[2 * size : -1], found[-1]
        if self._gathers:
            rows, nodes = [tokens] * size, [tokens] * len(nodes)
        rows[self.rank] = nodes[self.rank // self._width] = 0
        return Totals(tokens, pairs, rows, nodes)

    def traffic(self) -> Traffic:
        """This rank's share of a layer's traffic. Waits for the device."""
        tokens, pairs, rows, to_nodes = self.totals()
        sent, load = np.zeros((self.size, self.size), np.int64), np.array(pairs, np.int64)
        elsewhere, node_rows = np.zeros_like(sent), np.zeros((self.size, len(to_nodes)), np.int64)
        sent[self.rank], node_rows[self.rank] = rows, to_nodes
        elsewhere[self.rank] = load * (np.arange(self.size) != self.rank)
        return Traffic(sum(pairs), pairs[self.rank], tokens, sent, load, node_rows, elsewhere)
