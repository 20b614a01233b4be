"""The expert all-to-all: send every token once to each rank that holds some of its experts, and return the results.

`dispatch` returns a frozen handle that `combine` consumes, as DeepEP's do. Routing weights are applied where the
experts are, so one row per (token, destination rank) comes back, already summed over that rank's experts. A rank's rows
for itself are copied, not sent. `Dispatch` does the same in two steps: local rows are available while others are in
transit. Specification: `reference.dispatch` and `reference.combine`.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.runtime.argsort import argsort_ranks
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.parcels import send_rows
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
    """Send tokens (n, H) to the ranks that compute their chosen experts (n, K): targets (n, K), -1 for none."""
    flight = Dispatch(comm, hidden, expert_ids, weights, targets)
    return flight.received(), flight.handle


class Dispatch:
    """A dispatch in transit: `local` is available at once, `remote` waits for the other ranks' rows.

    All ranks must begin and finish dispatches in the same order, one at a time per communicator.
    """

    def __init__(
        self, comm: Communicator, hidden: Tensor, expert_ids: Tensor, weights: Tensor, targets: Tensor
    ) -> None:
        self._comm, self._columns = comm, (hidden.contiguous(), expert_ids, weights.contiguous())
        self._tokens, counts = rows_by_rank(targets, comm.size)
        self._sent, self._received = counts.tolist(), [0] * comm.size
        self._own = self._tokens.split(self._sent)[comm.rank]
        self._own_ids = torch.where(targets[self._own] == comm.rank, expert_ids[self._own], -1)
        ranks = torch.arange(comm.size, device=hidden.device).repeat_interleave(counts)
        away = ranks != comm.rank
        tokens, ranks = self._tokens[away], ranks[away]
        ids = torch.where(targets[tokens] == ranks[:, None], expert_ids[tokens], -1).to(torch.int32)
        counts[comm.rank] = 0
        columns = (self._columns[0], tokens), (ids, None), (self._columns[2], tokens)
        self._parcels = send_rows(comm, columns, counts)

    @property
    def handle(self) -> DispatchHandle:
        """What `combine` needs, once the other ranks' rows have arrived."""
        return DispatchHandle(self._tokens, self._sent, self._received, len(self._columns[0]))

    def local(self) -> ReceivedTokens:
        """This rank's own tokens whose experts are on this rank."""
        hidden, _, weights = self._columns
        return ReceivedTokens(hidden[self._own], self._own_ids, weights[self._own])

    def remote(self) -> ReceivedTokens:
        """Wait for the other ranks' rows and return them."""
        return self._unpack(0)

    def received(self) -> ReceivedTokens:
        """Wait for and return all rows: `remote`, then `local`."""
        hidden, _, weights = self._columns
        out = self._unpack(len(self._own))
        away = len(out.hidden) - len(self._own)
        for to, rows in ((out.hidden, hidden), (out.weights, weights)):
            torch.index_select(rows, 0, self._own, out=to[away:])
        out.expert_ids[away:] = self._own_ids
        return out

    def _unpack(self, more: int) -> ReceivedTokens:
        """The rows that arrived, in tensors with space for `more` rows."""
        self._received, (hidden, expert_ids, weights) = self._parcels.arrive(), self._columns
        n, top_k = sum(self._received), expert_ids.shape[1]
        self._received[self._comm.rank] = len(self._own)
        out = ReceivedTokens(
            hidden.new_empty((n + more, hidden.shape[1])),
            expert_ids.new_empty((n + more, top_k), dtype=torch.int64),
            weights.new_empty((n + more, top_k)),
        )
        ids = expert_ids.new_empty((n, top_k), dtype=torch.int32)
        self._parcels.unpack([out.hidden, ids, out.weights])
        out.expert_ids[:n] = ids
        return out


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
    return combine_parts(comm, results[away:], results[:away], handle)


def combine_parts(comm: Communicator, local: Tensor, remote: Tensor, handle: DispatchHandle) -> Tensor:
    """Same as `combine`, for separate results of `Dispatch.local` and `Dispatch.remote`."""
    remote = remote.contiguous()
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


@dataclass(frozen=True)
class Levels:
    """A rank's position among nodes of equal size, whose ranks are consecutive.

    inter joins the ranks at the same position in each node, in node order; intra joins the ranks of this node.
    """

    inter: Communicator
    intra: Communicator

    @property
    def rank(self) -> int:
        return self.inter.rank * self.intra.size + self.intra.rank

    def sent_to(self) -> Counter[int]:
        """Bytes of dispatch and combine to each rank."""
        width = self.intra.size
        across = {j * width + self.intra.rank: sent for j, sent in self.inter.sent_to.items()}
        return Counter(across) + Counter({self.inter.rank * width + j: sent for j, sent in self.intra.sent_to.items()})

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent, by tier; exchanged row counts are included."""
        return {"inter": sum(self.inter.sent.values()), "intra": sum(self.intra.sent.values())}


TwoLevelHandle = tuple[DispatchHandle, DispatchHandle]


def dispatch_two_level(
    levels: Levels, hidden: Tensor, expert_ids: Tensor, weights: Tensor, targets: Tensor
) -> tuple[ReceivedTokens, TwoLevelHandle]:
    """Same as `dispatch`, but send a token once to each destination *node*, whose rank at the same position forwards
    it to `targets` there, which travel with the expert ids.
    """
    width = levels.intra.size
    addressed = expert_ids * width + targets % width
    there, first = dispatch(levels.inter, hidden, addressed, weights, targets // width)
    known = there.expert_ids >= 0
    experts = torch.where(known, there.expert_ids // width, -1)
    inside = torch.where(known, there.expert_ids % width, -1)
    received, second = dispatch(levels.intra, there.hidden, experts, there.weights, inside)
    return received, (first, second)


def combine_two_level(levels: Levels, results: Tensor, handle: TwoLevelHandle) -> Tensor:
    """Return results: sum over the ranks of each node, then over nodes; both rounded to the results' type."""
    return combine(levels.inter, combine(levels.intra, results, handle[1]), handle[0])
