"""Counters of a process of a serving engine, published to Prometheus and as a file in the control folder.

docs/reference.md has their labels. A dispatcher sends one of three kinds of rows: per
(token, expert) pair (pairs{local="false"}; DeepEP's low latency), per (token, rank) (remote_rows), or per (token,
node), to be forwarded inside it (node_rows; DeepEP's normal kernels).
"""

import json
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
DESCRIPTIONS: dict[str, str] = json.loads(Path(__file__).with_name("counters.json").read_text(encoding="utf-8"))
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
