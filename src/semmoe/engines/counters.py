"""Counters of a process of a serving engine, published to Prometheus and as a file in the control folder.

docs/reference.md has their labels. A dispatcher sends one of three kinds of rows: per
(token, expert) pair (pairs{local="false"}; DeepEP's low latency), per (token, rank) (remote_rows), or per (token,
node), to be forwarded inside it (node_rows; DeepEP's normal kernels).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from semmoe.io.files import save_json

PREFIX = "semmoe_"
PERIOD = 1.0  # seconds between publications
GAUGES = {"active", "degraded", "plan_number", "request_plan_number"}
# Help texts by name, which is published with the prefix.
DESCRIPTIONS = {
    "active": "Ranks on which the plug-in runs, with its description: the proof of activity",
    "degraded": "Ranks whose hooks do not run as they should, by reason",
    "routed_tokens": "Token-layers routed, by home rank, each once",
    "pairs": "(token, expert) pairs, by home rank and whether that rank has the expert",
    "remote_rows": "Rows for other ranks in the expert dispatch, one per (token, rank), inside the node or between",
    "node_rows": "Rows for other nodes in the expert dispatch, one per (token, node)",
    "served_pairs": "(token, expert) pairs by the rank that computes them",
    "sent_bytes": "Bytes that semmoe's collectives sent, by kind",
    "messages": "Messages that semmoe's collectives sent to other ranks, by kind",
    "all_to_all_seconds": "Seconds in dispatch and combine on a CPU, waits for slower ranks included",
    "all_to_all_bytes": "Bytes of dispatch and combine, inside the node or between",
    "node_bytes": "Bytes of dispatch and combine by pair of nodes",
    "passes": "Forward passes by their slices, shuffled or contiguous",
    "plan_number": "Number of the plan that a rank serves on",
    "request_plan_number": "Number of the plan that assigns requests",
    "swaps": "Swaps to another plan, by outcome: done or refused",
    "swapped_slots": "Slots of experts that got another expert by swaps",
    "swapped_bytes": "Bytes of experts' weights that came from other ranks by swaps",
    "scheduled_requests": "Requests by data-parallel rank and by who chose it: plan, engine, or named (by the request)",
    "unknown_tokens": "Prompt token ids outside the plan's tables",
    "schedule_failures": "Requests that semmoe failed to schedule",
    "publications": "Times that a process has published its counters; it stops rising if they are stale",
}
log = logging.getLogger(__name__)
Labels = tuple[tuple[str, str], ...]
Reading = tuple[str, dict[str, str], float]  # name, labels, total so far


class Sample(BaseModel):
    """One counter in `activity-*.json`."""

    model_config = ConfigDict(extra="forbid")
    name: str
    labels: dict[str, str]
    value: float


class Activity(BaseModel):
    """`activity-*.json`: all counters of a process."""

    model_config = ConfigDict(extra="forbid")
    schema_version: int = 1
    process: str
    samples: list[Sample]


class Counters:
    """The counters of a process; `start` publishes them every second from its own thread.

    `add` counts at once. Totals that are counted in tensors are read by `sources` when counters are published, so that
    the engine never waits for them.
    """

    def __init__(self, process: str, folder: Path | None = None) -> None:
        self.sources: list[Callable[[], Iterator[Reading]]] = []
        self._process, self._folder = process, folder
        self._totals: dict[tuple[str, Labels], float] = {}
        self._published: dict[tuple[str, Labels], float] = {}
        self._prometheus: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        key = name, _labels(labels)
        with self._lock:
            self._totals[key] = self._totals.get(key, 0) + amount

    def readings(self) -> list[Reading]:
        """All totals, including those of `sources`."""
        with self._lock:
            own = [(name, dict(labels), value) for (name, labels), value in self._totals.items()]
        return own + [reading for source in self.sources for reading in source()]

    def start(self) -> None:
        threading.Thread(target=self._run, name="semmoe-metrics", daemon=True).start()

    def _run(self) -> None:
        said = ""
        while True:
            time.sleep(PERIOD)
            problem = self.try_to_publish()
            if problem and problem != said:
                log.warning("semmoe: counters cannot be published now: %s", problem)
            said = problem

    def try_to_publish(self) -> str:
        """Publish, and return a description of what failed, or "".

        The server continues: a full disk may get free space.
        """
        self.add("publications", 1, process=self._process)
        try:
            self.publish()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def publish(self) -> None:
        """Write the counters to Prometheus, if the engine collects over processes, and to the control folder."""
        readings = self.readings()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            for name, labels, value in readings:
                self._to_prometheus(name, _labels(labels), value)
        if self._folder is not None:
            samples = [Sample(name=name, labels=labels, value=value) for name, labels, value in readings]
            path = self._folder / f"activity-{self._process}.json"
            save_json(path, Activity(process=self._process, samples=samples))

    def _to_prometheus(self, name: str, labels: Labels, value: float) -> None:
        metric = self._prometheus.get(name)
        if metric is None:
            metric = self._prometheus[name] = _new_metric(name, [label for label, _ in labels])
        child = metric.labels(**dict(labels)) if labels else metric
        if name in GAUGES:
            child.set(value)
            return
        child.inc(value - self._published.get((name, labels), 0))
        self._published[name, labels] = value


def _labels(labels: dict[str, Any]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))


def _new_metric(name: str, labels: list[str]) -> Any:
    # Import only after the engine has set the shared folder of its processes, which the library reads at import.
    from prometheus_client import Counter, Gauge

    if name in GAUGES:
        return Gauge(PREFIX + name, DESCRIPTIONS[name], labels, multiprocess_mode="livesum")
    return Counter(PREFIX + name, DESCRIPTIONS[name], labels)
