"""Checksums of the experts in their slots, by which a move is checked before any token meets a moved expert.

A checksum is of an expert's weights as the engine holds them, packed or quantised. All slots of an expert must agree
before a layer's move. After it, every slot must hold the weights that its new expert had before. Therefore a server
holds the weights of its checkpoint after any number of moves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def checksums(weights: Sequence[Tensor]) -> Tensor:
    """(n, W * 2) int64 on the CPU, of W weights (n, ...) of n slots."""
    columns = [torch.stack([_sums(slot) for slot in weight.detach()]) for weight in weights]
    return torch.cat(columns, dim=1).cpu()


def _sums(slot: Tensor) -> Tensor:
    """(2,) int64, modulo 2**64, of the words of a tensor."""
    words = _words(slot).long()
    places = torch.arange(1, len(words) + 1, device=words.device)
    return torch.stack([words.sum(), (words * places).sum()])


def _words(slot: Tensor) -> Tensor:
    flat = slot.reshape(-1)
    bounds = flat.storage_offset(), flat.storage_offset() + len(flat)
    aligned = all(end * flat.element_size() % 4 == 0 for end in bounds)
    return flat.view(torch.int32 if aligned else torch.uint8)


def of_all_slots(own: Tensor, group: Any) -> Tensor:
    """(P, W * 2): the checksums of all ranks' slots, from each rank's own (P / G, W * 2)."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return torch.cat(everyone)


def by_expert(found: Tensor, experts: np.ndarray, num_experts: int) -> Tensor:
    """(E, W * 2): the checksum of each expert, from those of all slots (P, W * 2), which hold `experts` (P,).

    Raises ValueError if slots of an expert differ.
    """
    slots = torch.from_numpy(experts.astype(np.int64))
    out = torch.zeros((num_experts, found.shape[1]), dtype=torch.int64)
    out[slots] = found
    _compare(found, out[slots], experts, "differ from another copy of it")
    return out


def check_slots(found: Tensor, expected: Tensor, experts: np.ndarray, than: str = "those before the move") -> None:
    """Raise ValueError unless slots with checksums `found` hold `experts`; expected: `by_expert` of `than`."""
    slots = torch.from_numpy(experts.astype(np.int64))
    _compare(found, expected[slots], experts, f"differ from {than}")


def _compare(found: Tensor, expected: Tensor, experts: np.ndarray, what: str) -> None:
    wrong = (found != expected).any(dim=1).nonzero()[:, 0].tolist()
    if wrong:
        raise ValueError(f"the weights of expert {experts[wrong[0]]} in slot {wrong[0]} {what}")
