"""What one rank routes, counted on its device without waiting for it: `metrics.Traffic` of one rank."""

import numpy as np
import torch
from torch import Tensor

from semmoe.metrics import Traffic


class TrafficCounter:
    """Totals of the tokens whose home is this rank. `count` may be captured in a CUDA graph.

    gathers: rows travel to every rank, whatever their experts are.
    """

    counts = True

    def __init__(self, size: int, rank: int, device: str | torch.device = "cpu", gathers: bool = False) -> None:
        self.size, self.rank, self._gathers = size, rank, gathers
        self._pairs = torch.zeros(size + 1, dtype=torch.int64, device=device)  # by serving rank; the last: none
        self._rows = torch.zeros(size + 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, targets: Tensor) -> None:
        """The rank that serves each choice, targets (n, K), -1 for none (padding)."""
        owners = torch.where(targets < 0, self.size, targets).long()
        reached = torch.zeros((len(owners), self.size + 1), dtype=torch.int64, device=owners.device)
        reached.scatter_(1, owners, 1)
        self._rows += reached.sum(dim=0)
        self._pairs += torch.zeros_like(self._pairs).scatter_add_(
            0, owners.flatten(), torch.ones_like(owners.flatten())
        )
        self._tokens += reached[:, : self.size].any(dim=1).sum()

    def totals(self) -> tuple[int, list[int], list[int]]:
        """Tokens, pairs by serving rank, and rows by receiver, none to itself; waits for the device."""
        rows = [int(self._tokens)] * self.size if self._gathers else self._rows.tolist()
        rows[self.rank] = 0
        return int(self._tokens), self._pairs.tolist()[: self.size], rows[: self.size]

    def traffic(self) -> Traffic:
        """This rank's share of a layer's traffic; waits for the device."""
        tokens, pairs, rows = self.totals()
        sent = np.zeros((self.size, self.size), np.int64)
        sent[self.rank] = rows
        return Traffic(sum(pairs), pairs[self.rank], tokens, sent, np.array(pairs, np.int64))
