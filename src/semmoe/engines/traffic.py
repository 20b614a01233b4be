"""One rank's traffic as readings of counters: totals, and by pair of nodes.

Pairs of G ranks would be G * G series per counter, which Prometheus keeps for as long as it keeps anything.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from semmoe.engines.absent import NoTraffic
from semmoe.engines.counters import Reading
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.traffic import Totals, TrafficCounter
from semmoe.topology import Topology

MOST_PAIRED = 64  # nodes whose pairs are published: 4,096 series per counter


@dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """Publishes the traffic of a rank."""

    rank: int
    topology: Topology

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
        yield from self._elsewhere("remote_rows", "rows", totals.rows, totals.node_rows)

    def _elsewhere(self, name: str, unit: str, sent: list[int], to_nodes: list[int]) -> Iterator[Reading]:
        """Yield the counters of rows or bytes that left this rank: by tier (`name`), and by pair of nodes.

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


def _summed(counts: Sequence[Counter]) -> Counter:
    """The sum of counters that another thread may add to at the same time."""
    out: Counter = Counter()
    for one in counts:
        out.update(dict(list(one.items())))
    return out
