"""Count the traffic of one rank on its device, without waiting for it: `metrics.Traffic` of one rank."""

import numpy as np
import torch
from torch import Tensor

from semmoe.metrics import Traffic


class TrafficCounter:
    """Totals of the tokens whose home is this rank. `count` may be captured in a CUDA graph.

    gathers: every row is sent to every rank, whatever its experts are.
    """

    counts = True

    def __init__(self, size: int, rank: int, device: str | torch.device = "cpu", gathers: bool = False) -> None:
        self.size, self.rank, self._gathers = size, rank, gathers
        # by the rank that computes them; the last entry: none
        self._pairs = torch.zeros(size + 1, dtype=torch.int64, device=device)
        self._rows = torch.zeros(size + 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, targets: Tensor) -> None:
        """Count the rank that computes each chosen expert, targets (n, K), -1 for none (padding)."""
        owners = torch.where(targets < 0, self.size, targets).long()
        reached = torch.zeros((len(owners), self.size + 1), dtype=torch.int64, device=owners.device)
        reached.scatter_(1, owners, 1)
        self._rows += reached.sum(dim=0)
        self._pairs += torch.zeros_like(self._pairs).scatter_add_(
            0, owners.flatten(), torch.ones_like(owners.flatten())
        )
        self._tokens += reached[:, : self.size].any(dim=1).sum()

    def totals(self) -> tuple[int, list[int], list[int]]:
        """Tokens, pairs by the rank that computes them, and rows by receiver (0 to itself). Waits for the device."""
        rows = [int(self._tokens)] * self.size if self._gathers else self._rows.tolist()
        rows[self.rank] = 0
        return int(self._tokens), self._pairs.tolist()[: self.size], rows[: self.size]

    def traffic(self) -> Traffic:
        """This rank's share of a layer's traffic. Waits for the device."""
        tokens, pairs, rows = self.totals()
        sent, load = np.zeros((self.size, self.size), np.int64), np.array(pairs, np.int64)
        sent[self.rank], elsewhere = rows, np.zeros_like(sent)
        elsewhere[self.rank] = load * (np.arange(self.size) != self.rank)
        one_node = np.zeros((self.size, 1), np.int64)
        return Traffic(sum(pairs), pairs[self.rank], tokens, sent, load, one_node, elsewhere)
