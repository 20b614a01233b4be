"""The expert all-to-all: send every token once to each rank that holds some of its experts, and return the results.

`dispatch` returns a frozen handle that `combine` consumes, as DeepEP's do. Routing weights are applied where the
experts are, so one row per (token, destination rank) comes back, already summed over that rank's experts. A rank's rows
for itself are copied, not sent. Specification: `reference.dispatch` and `reference.combine`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.runtime.argsort import argsort_ranks
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.parcels import CountedParcels, HeadedParcels, send_rows
from semmoe.runtime.rows import add_rows


@dataclass(frozen=True)
class DispatchHandle:
    """The destination of each row of a dispatch, used by `combine`.

    Worked example, rank 0 of two, tokens 0..2 whose experts are on ranks [0, 1], [1, 1], [0, 0]:
    tokens = [0, 2, 0, 1], num_tokens_per_rank = [2, 2]; only the last two rows leave the rank.
    """

    tokens: Tensor  # (M,) int64: the token of each row, rows ordered by destination rank
    num_tokens_per_rank: list[int]  # rows for each rank, this one included
    received: list[int]  # rows from each rank, this one included
    num_tokens: int


@dataclass(frozen=True)
class ReceivedTokens:
    """Rows for this rank's experts: from the other ranks in rank order, then own tokens."""

    hidden: Tensor  # (M', H)
    expert_ids: Tensor  # (M', K) int64, -1 where another rank computes the expert
    weights: Tensor  # (M', K)


def dispatch(
    comm: Communicator, hidden: Tensor, expert_ids: Tensor, weights: Tensor, targets: Tensor
) -> tuple[ReceivedTokens, DispatchHandle]:
    """Send tokens (n, H) to the ranks that compute their chosen experts (n, K): targets (n, K), -1 for none.

    All ranks must begin dispatches in the same order.
    """
    hidden, weights = hidden.contiguous(), weights.contiguous()
    tokens, counts = rows_by_rank(targets, comm.size)
    sent = counts.tolist()
    own = tokens.split(sent)[comm.rank]
    own_ids = torch.where(targets[own] == comm.rank, expert_ids[own], -1)
    parcels = _send(comm, (hidden, expert_ids, weights), targets, tokens, counts)
    received = parcels.arrive()
    n, top_k = sum(received), expert_ids.shape[1]
    received[comm.rank] = len(own)
    out = ReceivedTokens(
        hidden.new_empty((n + len(own), hidden.shape[1])),
        expert_ids.new_empty((n + len(own), top_k), dtype=torch.int64),
        weights.new_empty((n + len(own), top_k)),
    )
    ids = expert_ids.new_empty((n, top_k), dtype=torch.int32)
    parcels.unpack([out.hidden, ids, out.weights])
    out.expert_ids[:n] = ids
    out.expert_ids[n:] = own_ids
    for to, rows in ((out.hidden, hidden), (out.weights, weights)):
        torch.index_select(rows, 0, own, out=to[n:])
    return out, DispatchHandle(tokens, sent, received, len(hidden))


def _send(
    comm: Communicator, columns: tuple[Tensor, Tensor, Tensor], targets: Tensor, tokens: Tensor, counts: Tensor
) -> HeadedParcels | CountedParcels:
    """Start to send the rows of `tokens` (M,), ordered by rank, to the other ranks; counts (size,): rows per rank."""
    hidden, expert_ids, weights = columns
    ranks = torch.arange(comm.size, device=hidden.device).repeat_interleave(counts)
    away = ranks != comm.rank
    tokens, ranks = tokens[away], ranks[away]
    ids = torch.where(targets[tokens] == ranks[:, None], expert_ids[tokens], -1).to(torch.int32)
    counts[comm.rank] = 0
    return send_rows(comm, ((hidden, tokens), (ids, None), (weights, tokens)), counts)


def rows_by_rank(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """From targets (n, K), -1 for none: the token of each row (M,), ordered by rank, and the rows per rank (size,).

    Worked example, two ranks, targets [0, 1], [1, 1], [0, -1]: tokens [0, 2, 0, 1], counts [2, 2].
    """
    n, top_k = targets.shape
    again = (targets[:, :, None] == targets[:, None, :]).tril(-1).any(dim=2)
    order, _, counts = argsort_ranks(torch.where(again | (targets < 0), size, targets).flatten(), size + 1)
    return order[: n * top_k - int(counts[size])] // max(top_k, 1), counts[:size].contiguous()


def combine(comm: Communicator, results: Tensor, handle: DispatchHandle) -> Tensor:
    """Return the experts' results (M', H), in the order of `ReceivedTokens`, to their ranks; sum per token: (n, H).

    Sums are in rank order, in float32 (float64 for float64), and rounded once.
    """
    away = sum(handle.received) - handle.received[comm.rank]
    local, remote = results[away:], results[:away].contiguous()
    send, receive = _without(handle.received, comm.rank), _without(handle.num_tokens_per_rank, comm.rank)
    back = comm.staging("combined", (sum(receive), remote.shape[1]), remote)
    comm.count("combine", send, remote.shape[1] * remote.element_size())
    comm.wait("combine", comm.exchange("combine", back.split(receive), remote.split(send)))
    kind = torch.promote_types(remote.dtype, torch.float32)
    out = torch.zeros((handle.num_tokens, remote.shape[1]), dtype=kind, device=remote.device)
    parts = list(back.split(receive))
    parts[comm.rank] = local
    for rows, tokens in zip(parts, handle.tokens.split(handle.num_tokens_per_rank), strict=True):
        add_rows(out, rows, tokens)
    return out.to(remote.dtype)


def _without(counts: list[int], rank: int) -> list[int]:
    return [0 if j == rank else count for j, count in enumerate(counts)]
