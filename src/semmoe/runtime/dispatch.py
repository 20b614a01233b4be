"""The expert all-to-all: send every token once to each rank that holds some of its experts, and return the results.

`dispatch` returns a frozen handle that `combine` consumes, as DeepEP's do. Routing weights are applied where the
experts are, so one row per (token, destination rank) comes back, already summed over that rank's experts. A rank's rows
for itself are copied, not sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.rows import pack_rows, unpack_rows


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
    tokens, counts = rows_by_rank(targets, comm.size)
    sent = counts.tolist()
    ranks = torch.arange(comm.size, device=targets.device).repeat_interleave(counts)
    ids = torch.where(targets[tokens] == ranks[:, None], expert_ids[tokens], -1).to(torch.int32)
    parts = pack_rows([hidden[tokens], ids, weights[tokens]]).split(sent)
    arrived = comm.exchange_rows("dispatch", parts)
    handle = DispatchHandle(tokens, sent, [len(part) for part in arrived], len(hidden))
    rows = torch.cat([*arrived[: comm.rank], *arrived[comm.rank + 1 :], arrived[comm.rank]])
    hidden_rows, ids, row_weights = unpack_rows(rows, [hidden, ids, weights])
    return ReceivedTokens(hidden_rows, ids.long(), row_weights), handle


def rows_by_rank(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """From targets (n, K), -1 for none: the token of each row (M,), ordered by rank, and the rows per rank (size,).

    Worked example, two ranks, targets [0, 1], [1, 1], [0, -1]: tokens [0, 2, 0, 1], counts [2, 2].
    """
    reached = targets.new_zeros((len(targets), size + 1), dtype=torch.bool)  # the last column is for none
    reached.scatter_(1, torch.where(targets < 0, size, targets).long(), True)
    _, tokens = reached[:, :size].T.nonzero(as_tuple=True)
    return tokens, reached[:, :size].sum(dim=0)


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
        out.index_add_(0, tokens, rows.to(kind))
    return out.to(remote.dtype)


def _without(counts: list[int], rank: int) -> list[int]:
    return [0 if j == rank else count for j, count in enumerate(counts)]
