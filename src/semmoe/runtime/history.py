"""Predict a request's next token from its previous ones: a state per request slot and layer."""

import torch
from torch import Tensor

from semmoe.runtime import kernels
from semmoe.runtime.tables import ScoreTables, Turns


class History:
    """The states of a fixed number of slots, at addresses that do not change.

    running: the mean of the projected rows of the chosen experts, weighted towards recent tokens, in units of
    1 / 2**FRACTION table units. previous: the rows of the previous token. seen: the number of tokens.
    """

    def __init__(self, tables: ScoreTables, num_slots: int) -> None:
        layers, _, ranks = tables.history_scores.shape
        self._rows, device = tables.history_scores, tables.history_scores.device
        self._kernels = kernels.of(device)
        self._running = torch.zeros((layers, num_slots, ranks), dtype=torch.int32, device=device)
        self._previous = torch.zeros_like(self._running)
        self._seen = torch.zeros((layers, num_slots), dtype=torch.int64, device=device)
        self.reset(torch.arange(num_slots, device=device))

    def reset(self, slots: Tensor) -> None:
        """Forget the requests in `slots`: new ones begin there."""
        for state in (self._running, self._seen):
            state.index_fill_(1, slots, 0)  # a number that is assigned by index is copied from the host on a GPU
        self._previous[:, slots] = self._rows[:, -1:].int()

    def contribution(self, layer: int, slots: Tensor, decoding: Tensor) -> Tensor:
        """(B, G) int32 to add to the scores of the tokens of `slots` (B,), which have the mean unless `decoding`."""
        states = self._running[layer], self._previous[layer]
        return self._kernels.contribution(self._rows[layer], *states, slots, decoding)

    def observe(self, layer: int, slots: Tensor, expert_ids: Tensor) -> Tensor:
        """Observe one token per slot: `slots` (B,) chose `expert_ids` (B, K). Returns them, with 0 for padding."""
        states = (state[layer] for state in (self._running, self._previous, self._seen))
        return self._kernels.observe(self._rows[layer], *states, slots, expert_ids)

    def observe_in_turn(self, turns: Turns, expert_ids: Tensor) -> None:
        """Observe several tokens per slot in order, at every layer; expert_ids: (L, N, K)."""
        states = self._running, self._previous, self._seen
        self._kernels.observe_in_turn(self._rows, *states, turns, expert_ids)
