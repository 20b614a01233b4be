"""One rank's traffic as readings of counters: totals, by pair of nodes, and by pair of ranks where that is asked for.

Pairs of G ranks are G * G series per counter, which Prometheus keeps for as long as it keeps anything. Therefore they
are off by default, and refused where they would be more than MOST_PAIRED squared.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from semmoe.engines.absent import NoTraffic
from semmoe.engines.counters import Reading
from semmoe.engines.settings import PluginSettings
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.traffic import Totals, TrafficCounter
from semmoe.topology import Topology

MOST_PAIRED = 64  # ranks, or nodes, whose pairs are published: 4,096 series per counter
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """How the traffic of one rank is published."""

    rank: int
    topology: Topology
    by_rank_pair: bool = False
    refused: str = ""  # why pairs of ranks, which were asked for, are not published

    def readings(
        self, traffic: TrafficCounter | NoTraffic, dispatch: Sequence[Communicator], others: Sequence[Communicator]
    ) -> Iterator[Reading]:
        """Yield all counters of this rank's traffic.

        dispatch: the communicators of its expert all-to-all, if that is semmoe's; others: its other communicators.
        """
        if isinstance(traffic, TrafficCounter):
            yield from self._routed(traffic.totals())
        for kind, sent in _summed([comm.sent for comm in (*dispatch, *others)]).items():
            yield "sent_bytes", {**self._own, "kind": str(kind)}, sent
        for kind, messages in _summed([comm.messages for comm in (*dispatch, *others)]).items():
            yield "messages", {**self._own, "kind": str(kind)}, messages
        if dispatch:
            seconds = sum(sum(comm.seconds.values()) for comm in dispatch)
            yield "all_to_all_seconds", self._own, seconds
            yield from self._exchanged(_summed([comm.sent_to for comm in dispatch]))
        if self.refused:
            yield "degraded", {"reason": self.refused}, 1.0

    @property
    def _own(self) -> dict[str, str]:
        return {"ep_rank": str(self.rank)}

    @property
    def _node(self) -> int:
        return int(self.topology.node_of[self.rank])

    def _routed(self, totals: Totals) -> Iterator[Reading]:
        """What routing makes of this rank's tokens, whoever sends their rows."""
        local = totals.pairs[self.rank]
        yield "routed_tokens", self._own, totals.tokens
        yield "pairs", {**self._own, "local": "true"}, local
        yield "pairs", {**self._own, "local": "false"}, sum(totals.pairs) - local
        for j, count in enumerate(totals.pairs):
            yield "served_pairs", {"by": str(j)}, count
        yield from self._by_tier("remote_rows", totals.rows)
        yield from self._by_node("node_rows", totals.node_rows)
        yield from self._by_rank("rank_pair_rows", totals.rows)
        for j, count in enumerate(totals.pairs if self.by_rank_pair else ()):
            yield "rank_pair_served", {**self._own, "to": str(j)}, count

    def _exchanged(self, sent_to: Counter) -> Iterator[Reading]:
        """Bytes of semmoe's own all-to-all, by the rank (int) that received them."""
        sent = [int(sent_to[j]) for j in range(self.topology.ep_size)]
        to_nodes = np.array(sent).reshape(self.topology.num_nodes, -1).sum(axis=1).tolist()
        yield from self._by_tier("all_to_all_bytes", sent)
        yield from self._by_node("node_bytes", to_nodes)
        yield from self._by_rank("rank_pair_bytes", sent)

    def _by_tier(self, name: str, sent: list[int]) -> Iterator[Reading]:
        """sent (G,) to each rank, 0 to itself."""
        inside = int(np.array(sent)[self.topology.node_of == self._node].sum())
        yield name, {**self._own, "tier": "node"}, inside
        yield name, {**self._own, "tier": "network"}, sum(sent) - inside

    def _by_node(self, name: str, sent: list[int]) -> Iterator[Reading]:
        """sent to each node; nothing on one node, and for too many nodes one total under the name `others`."""
        remote = {str(j): count for j, count in enumerate(sent) if j != self._node}
        if len(sent) > MOST_PAIRED:
            remote = {"others": sum(remote.values())}
        for to_node, count in remote.items():
            yield name, {"node": str(self._node), "to_node": to_node}, count

    def _by_rank(self, name: str, sent: list[int]) -> Iterator[Reading]:
        """sent (G,) to each rank, if pairs of ranks are published."""
        for j, count in enumerate(sent if self.by_rank_pair else ()):
            if j != self.rank:
                yield name, {**self._own, "to": str(j)}, count


def rank_traffic(rank: int, topology: Topology, settings: PluginSettings) -> RankTraffic:
    """How settings publish a rank's traffic. Rank 0 logs a warning if there are too many ranks for pairs of them."""
    refused = too_many_pairs(topology.ep_size) if settings.rank_pairs == "1" else ""
    if refused and rank == 0:
        log.warning("semmoe: degraded: %s", refused)
    paired = settings.rank_pairs == "1" and not refused
    return RankTraffic(rank=rank, topology=topology, by_rank_pair=paired, refused=refused)


def too_many_pairs(ep_size: int) -> str:
    """Why traffic is not published by pair of ranks; "" if it can be."""
    if ep_size <= MOST_PAIRED:
        return ""
    return (
        f"SEMMOE_RANK_PAIRS=1 publishes traffic by pair of at most {MOST_PAIRED} ranks: {ep_size} ranks would be "
        f"{ep_size**2:,} series per counter; totals by rank and by pair of nodes are published"
    )


def _summed(counts: Sequence[Counter]) -> Counter:
    """The sum of counters that another thread may add to at the same time."""
    out: Counter = Counter()
    for one in counts:
        out.update(dict(list(one.items())))
    return out
