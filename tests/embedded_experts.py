"""Experts and tables of the embedded engine on one rank, changed by swaps of the plan between batches.

The reference of the engines' own moves: each slot's expert comes from this rank if it had it, else from the first of
the ranks that had it.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.core import Plan
from semmoe.engines.transformers.parallel import ParallelModel
from semmoe.runtime.copies import rank_copies
from semmoe.runtime.shuffler import Shuffler


class LiveExperts:
    """See `semmoe.live.swap.Experts`."""

    def __init__(self, model: ParallelModel) -> None:
        self._model, self._next = model, model.plan

    def prepare(self, plan: Plan) -> None:
        """Keep the plan; its tables are made when they are installed, since no request waits."""
        self._next = plan

    def weights(self, layer: int) -> Sequence[Tensor]:
        """The parameters of this rank's experts of a layer."""
        return self._model.experts[layer].weights

    def move(self, layer: int, old: np.ndarray, new: np.ndarray) -> None:
        """All ranks exchange the experts that change ranks, each once for each rank that needs it."""
        comm, weights = self._model.comm, self.weights(layer)
        size = len(old) // comm.size
        held, wanted = old.reshape(comm.size, size), new.reshape(comm.size, size)
        came = {expert: [torch.empty_like(weight[0]) for weight in weights] for expert in wanted[comm.rank]}
        operations = []
        for expert, source, target in transfers(held, wanted):
            if comm.rank == source:
                slot = int((held[source] == expert).argmax())
                operations += [dist.P2POp(dist.isend, w[slot], group=comm.group, group_peer=target) for w in weights]
            elif comm.rank == target:
                operations += [
                    dist.P2POp(dist.irecv, part, group=comm.group, group_peer=source) for part in came[expert]
                ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for expert in np.intersect1d(wanted[comm.rank], held[comm.rank]):
            slot = int((held[comm.rank] == expert).argmax())
            for part, weight in zip(came[expert], weights, strict=True):
                part.copy_(weight[slot])
        for slot, expert in enumerate(wanted[comm.rank]):
            for part, weight in zip(came[expert], weights, strict=True):
                weight[slot].copy_(part)

    def commit(self, layers: Sequence[int]) -> None:
        """Install the copy choice of the prepared plan for these layers."""
        copies = rank_copies(self._next, self._model.comm.rank)
        for layer in layers:
            self._model.copies[layer] = copies[layer]

    def finish(self) -> None:
        """The token tables."""
        model = self._model
        group = model.comm.rank // self._next.topology.attn_tp_size
        model.plan = self._next
        model.rows.make = lambda plan: Shuffler(plan, group, model.attention_comm.rank, "cpu")
        model.rows.prepare(self._next)
        model.rows.switch()


def transfers(held: np.ndarray, wanted: np.ndarray) -> list[tuple[int, int, int]]:
    """(expert, source, target) of what changes ranks; held and wanted (G, P / G) logical ids, by rank.

    Worked example, ranks with experts [[0, 1], [2, 3]] that are to have [[0, 2], [1, 3]]: [(2, 1, 0), (1, 0, 1)].
    """
    out = []
    for target, (has, wants) in enumerate(zip(held, wanted, strict=True)):
        for expert in np.setdiff1d(wants, has):
            out.append((int(expert), int((held == expert).any(axis=1).argmax()), target))
    return out
