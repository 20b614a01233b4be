"""The router's own `/metrics`.

Names (all begin with `semmoe_router_`, counters end with `_total`) with their labels in braces:

    requests{endpoint, status, backend}  requests answered. Endpoint `other`: forwarded without scheduling; status 499:
                                         the client hung up; backend `none`: the router itself answered
    scheduled_requests{dp_rank, by}      choices of a rank; by = plan, named (the request named its rank) or engine
    unknown_tokens                       prompt token ids that are not in the plan's tables
    schedule_failures                    requests that could not be scheduled and were forwarded anyway
    prompt_tokens, cached_tokens         prompt tokens of scheduled requests: all, and those expected in a rank's cache
    retries                              requests sent to another backend because the first could not be reached
    in_flight{backend}                   requests that a backend is working on
    queued                               requests that wait, or whose body is still being read
    healthy{backend}                     1 or 0
    added_seconds                        time from reading the body to sending the request: tokenise, schedule, queue;
                                         the wait of --window-ms, up to that long, comes on top
    queue_seconds                        the part of added_seconds that is spent in the queue
"""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from semmoe.router.backends import Fleet
from semmoe.router.gate import Gate

PREFIX = "semmoe_router_"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)


class Meters:
    """The counters of one router; each router of a process has its own registry."""

    def __init__(self, fleet: Fleet, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", ["endpoint", "status", "backend"])
        self.scheduled = self._counter(
            "scheduled_requests", "Requests scheduled, by rank and by who chose it", ["dp_rank", "by"]
        )
        self.unknown_tokens = self._counter("unknown_tokens", "Prompt token ids outside the plan's tables")
        self.schedule_failures = self._counter("schedule_failures", "Requests that could not be scheduled")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of scheduled requests")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that their rank should have cached")
        self.retries = self._counter("retries", "Requests sent to another backend")
        self.added = self._histogram("added_seconds", "From reading the body to sending the request")
        self.queued = self._histogram("queue_seconds", "Time in the queue")
        running, healthy = (
            self._gauge("in_flight", "Requests that the backend is working on"),
            self._gauge("healthy", "1 or 0"),
        )
        for backend in fleet.backends:
            running.labels(backend.url).set_function(lambda backend=backend: backend.running)
            healthy.labels(backend.url).set_function(lambda backend=backend: float(backend.healthy))
        waiting = Gauge(PREFIX + "queued", "Requests that wait, or whose body is being read", registry=self._registry)
        waiting.set_function(lambda: gate.inside - gate.running)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(PREFIX + name, text, labels or [], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=BUCKETS, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Any:
        return Gauge(PREFIX + name, text, ["backend"], registry=self._registry)
