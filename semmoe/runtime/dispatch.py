"""The expert all-to-all: every token goes once to each rank that holds some of its experts, and its result back.

`dispatch` returns a frozen handle that `combine` consumes. Routing weights are applied where the experts are, so one
row per (token, destination rank) comes back, already summed over that rank's experts.
"""

from dataclasses import dataclass

import torch

from semmoe.runtime.collectives import Communicator


@dataclass(frozen=True)
class DispatchHandle:
    tokens: torch.Tensor  # (M,) int64: the token of each row sent, rows ordered by destination rank
    sent: list[int]  # rows sent to each rank, this one included
    received: list[int]
    num_tokens: int


@dataclass(frozen=True)
class ReceivedTokens:
    """Rows that arrived at this rank's experts."""

    hidden: torch.Tensor  # (M', H)
    expert_ids: torch.Tensor  # (M', K) int64, -1 where the choice is another rank's
    weights: torch.Tensor  # (M', K)


def dispatch(
    comm: Communicator, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, serving: torch.Tensor
) -> tuple[ReceivedTokens, DispatchHandle]:
    """Send tokens (n, H) with their choices (n, K) to the ranks in `serving` (E,), the rank that serves each expert."""
    target = serving[expert_ids]  # (n, K)
    ranks = torch.arange(comm.size, device=hidden.device)
    destination, tokens = (target[None] == ranks[:, None, None]).any(dim=2).nonzero(as_tuple=True)
    theirs = target[tokens] == destination[:, None]
    ids = torch.where(theirs, expert_ids[tokens], -1).to(torch.int32)
    counts = torch.bincount(destination, minlength=comm.size)
    received = comm.exchange_counts(counts).tolist()
    sent = counts.tolist()
    packed = _pack(hidden[tokens], ids, weights[tokens])
    arrived = comm.all_to_all(packed, sent, received, "dispatch")
    rows = _unpack(arrived, hidden, weights, expert_ids.shape[1])
    return rows, DispatchHandle(tokens, sent, received, len(hidden))


def combine(comm: Communicator, results: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
    """Send the experts' results (M', H) back and sum them per token, in rank order: (n, H)."""
    back = comm.all_to_all(results, handle.received, handle.sent, "combine")
    out = results.new_zeros((handle.num_tokens, results.shape[1]))
    return out.index_add_(0, handle.tokens, back)


def _pack(*columns: torch.Tensor) -> torch.Tensor:
    """Columns side by side as bytes, so that one collective carries them all."""
    return torch.cat([c.contiguous().view(torch.uint8) for c in columns], dim=1)


def _unpack(rows: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor, top_k: int) -> ReceivedTokens:
    widths = [hidden.shape[1] * hidden.element_size(), 4 * top_k, top_k * weights.element_size()]
    columns = [part.contiguous() for part in rows.split(widths, dim=1)]
    return ReceivedTokens(
        columns[0].view(hidden.dtype), columns[1].view(torch.int32).long(), columns[2].view(weights.dtype)
    )
