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
        comms = [*dispatch, *others]
        for name, counts in (("sent_bytes", [c.sent for c in comms]), ("messages", [c.messages for c in comms])):
            for kind, count in _summed(counts).items():
                yield name, {**self._own, "kind": str(kind)}, count
        if dispatch:
            yield "all_to_all_seconds", self._own, sum(sum(comm.seconds.values()) for comm in dispatch)
            sent_to = _summed([comm.sent_to for comm in dispatch])
            sent = [int(sent_to[j]) for j in range(self.topology.ep_size)]
            to_nodes = np.array(sent).reshape(self.topology.num_nodes, -1).sum(axis=1).tolist()
            yield from self._elsewhere("all_to_all_bytes", "bytes", sent, to_nodes)
        if self.refused:
            yield "degraded", {"reason": self.refused}, 1.0

    @property
    def _own(self) -> dict[str, str]:
        return {"ep_rank": str(self.rank)}

    def _routed(self, totals: Totals) -> Iterator[Reading]:
        """What routing makes of this rank's tokens, whoever sends their rows."""
        local = totals.pairs[self.rank]
        yield "routed_tokens", self._own, totals.tokens
        yield "pairs", {**self._own, "local": "true"}, local
        yield "pairs", {**self._own, "local": "false"}, sum(totals.pairs) - local
        for j, count in enumerate(totals.pairs):
            yield "served_pairs", {"by": str(j)}, count
            if self.by_rank_pair:
                yield "rank_pair_served", {**self._own, "to": str(j)}, count
        yield from self._elsewhere("remote_rows", "rows", totals.rows, totals.node_rows)

    def _elsewhere(self, name: str, unit: str, sent: list[int], to_nodes: list[int]) -> Iterator[Reading]:
        """Yield what left this rank by tier (`name`), by pair of nodes, and by pair of ranks if they are published.

        sent (G,) to each rank, 0 to itself; to_nodes (N,) to each node. Too many nodes become one, `others`.
        """
        node = int(self.topology.node_of[self.rank])
        inside = int(np.array(sent)[self.topology.node_of == node].sum())
        yield name, {**self._own, "tier": "node"}, inside
        yield name, {**self._own, "tier": "network"}, sum(sent) - inside
        remote = {str(j): count for j, count in enumerate(to_nodes) if j != node}
        if len(to_nodes) > MOST_PAIRED:
            remote = {"others": sum(remote.values())}
        for to_node, count in remote.items():
            yield f"node_{unit}", {"node": str(node), "to_node": to_node}, count
        for j, count in enumerate(sent if self.by_rank_pair else ()):
            if j != self.rank:
                yield f"rank_pair_{unit}", {**self._own, "to": str(j)}, count


def rank_traffic(rank: int, topology: Topology, settings: PluginSettings) -> RankTraffic:
    """How settings publish a rank's traffic. Rank 0 logs a warning if there are too many ranks for pairs of them."""
    asked = settings.rank_pairs == "1"
    if not asked or topology.ep_size <= MOST_PAIRED:
        return RankTraffic(rank=rank, topology=topology, by_rank_pair=asked)
    refused = (
        f"SEMMOE_RANK_PAIRS=1 publishes traffic by pair of at most {MOST_PAIRED} ranks: {topology.ep_size} ranks would "
        f"be {topology.ep_size**2:,} series per counter; totals by rank and by pair of nodes are published"
    )
    if rank == 0:
        log.warning("semmoe: degraded: %s", refused)
    return RankTraffic(rank=rank, topology=topology, refused=refused)


def _summed(counts: Sequence[Counter]) -> Counter:
    """The sum of counters that another thread may add to at the same time."""
    out: Counter = Counter()
    for one in counts:
        out.update(dict(list(one.items())))
    return out
