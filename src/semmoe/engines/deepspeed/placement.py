"""Move experts to the slots of a plan, from the ranks to which AutoEP assigned them in order."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semmoe.runtime.collectives import Communicator


def place_experts(comm: Communicator, layer: Any, held: np.ndarray) -> None:
    """Move an AutoEPMoELayer's experts to held (G, P / G), logical ids by rank and slot; P may exceed E."""
    experts = layer.experts
    for name in ("w1", "w2", "w3"):
        weights = getattr(experts, name)
        if hasattr(weights, "ds_id"):
            raise ValueError("experts partitioned by ZeRO stage 3 cannot be moved: use a lower stage")
        setattr(experts, name, nn.Parameter(exchange_experts(comm, weights.data, held), requires_grad=False))
    layer.num_experts, layer.num_local_experts = held.size, held.shape[1]
    experts.num_experts = held.shape[1]
    layer.tokens_per_expert = layer.tokens_per_expert.new_zeros(held.size)


def exchange_experts(comm: Communicator, own: Tensor, held: np.ndarray) -> Tensor:
    """own (E / G, ...), this rank's experts in the order of their ids -> (P / G, ...), those of `held[rank]`.

    Worked example, experts 0 1 | 2 3 on two ranks and held [[3, 0], [1, 2]]: rank 0 sends expert 1, gets expert 3.
    """
    share = len(own)
    if np.array_equal(held.flatten(), np.arange(comm.size * share)):
        return own
    send = [own[ids[ids // share == comm.rank] % share] for ids in torch.from_numpy(held.astype(np.int64))]
    owners = held[comm.rank] // share
    receive = [own.new_empty((int((owners == j).sum()), *own.shape[1:])) for j in range(comm.size)]
    receive[comm.rank] = send[comm.rank]
    for work in comm.exchange("experts", receive, send):
        work.wait()
    slots = torch.from_numpy(np.argsort(np.argsort(owners, kind="stable"), kind="stable"))
    return torch.cat(receive)[slots.to(own.device)]
