"""Tell a shuffler the routing of a pass without a group of processes."""

import torch

from semmoe.runtime.shuffle import ShuffleHandle


class Alone:
    """A group's communicator on one rank that holds all rows in the pass's order."""

    @staticmethod
    def all_gather(columns):
        return columns


def tell(shuffler, layer, expert_ids) -> None:
    """Observe the experts (N, K) of all rows, as an all-gather that brings them in order does."""
    every = torch.arange(len(expert_ids), device=expert_ids.device)
    handle = ShuffleHandle(every, every, every, len(every), 0)
    rows = every[:, None].expand(-1, 3)
    whole, ids = shuffler.gather(Alone, rows, expert_ids, handle, layer)
    assert whole.shape == rows.shape
    assert ids.shape == expert_ids.shape
