"""The activity of a server between two readings of its counters: the figures of `semmoe watch`."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from io import StringIO
from typing import Any

from prometheus_client.parser import text_fd_to_metric_families

from semmoe.engines.counters import GAUGES, PREFIX
from semmoe.live.http import PLAIN, Client, split_address

METRICS_SECONDS = 10.0  # in which a server answers with its counters
STALE_SECONDS = 5.0  # counters are published every second
ENOUGH_PAIRS = 10_000  # (token, expert) pairs; a local activation rate of fewer pairs is too noisy
Labels = frozenset[tuple[str, str]]
Totals = Mapping[tuple[str, Labels], float]  # value by name and labels


@dataclass(frozen=True)
class Look:
    """A server's counters at one time, by name without prefix and by labels."""

    time: float  # seconds, by any monotonic clock
    totals: Totals


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one node or rank sent to another in the expert all-to-all."""

    source: str
    target: str
    rows_per_second: float  # between nodes one per (token, node), between ranks one per (token, rank)
    bytes_per_second: float | None  # None if semmoe does not do the all-to-all


@dataclass(frozen=True, kw_only=True)
class View:
    """The activity of a server between two readings. A figure is None if its counters did not change."""

    seconds: float
    active: dict[str, str]  # engine, plan and other labels that the plug-in exports
    ranks: int
    plans: list[str]  # the names of the plans that ranks serve on: one, unless something is wrong; empty without a plan
    lar: float | None
    pairs: int  # number of (token, expert) pairs from which `lar` is computed
    routed_tokens_per_second: float  # a token counts once per MoE layer
    remote_ranks_per_token: float | None
    network_ranks_per_token: float | None  # remote ranks on another node
    remote_nodes_per_token: float | None  # None on one node
    remote_pairs_per_token: float | None
    all_to_all_bytes_per_token: float | None  # per layer; None if semmoe does not do the all-to-all
    node_pairs: list[Sent]  # empty on one node
    load: dict[str, float]  # (token, expert) pairs by the rank that computes them, over the mean of ranks
    scheduled: dict[str, int]  # requests that the plan scheduled, by rank
    named: int  # requests that named their rank
    by_engine: int  # requests whose rank the engine chose
    unknown_tokens: int
    schedule_failures: int
    degraded: list[str]  # reasons why the plug-in does not do all that it should
    stale: list[str]  # processes that no longer publish counters, so that the figures miss their activity

    @property
    def known_lar(self) -> float | None:
        """`lar` if it is of enough pairs to be judged by."""
        return self.lar if self.pairs >= ENOUGH_PAIRS else None

    def below(self, expected: float | None, margin: float) -> bool:
        """Whether `known_lar` is more than `margin` below `expected`."""
        lar = self.known_lar
        return expected is not None and lar is not None and lar < expected - margin


def look(urls: Sequence[str], time: float, client: Client = PLAIN) -> Look:
    """Read the counters of a server's nodes, and add them up. Raises ValueError as `fetch` and `parse` do."""
    return parse({url: fetch(url, client) for url in urls}, time)


def fetch(url: str, client: Client = PLAIN) -> str:
    """The text of a server's /metrics; bytes of others that are not UTF-8 are replaced. Raises ValueError."""
    parts = split_address(url)
    path = parts.path if parts.path.endswith("/metrics") else parts.path.rstrip("/") + "/metrics"
    try:
        return client.read(f"{parts.scheme}://{parts.netloc}{path}", METRICS_SECONDS).decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise ValueError(f"{url} gives no metrics: {client.reason(error)}") from None


def parse(pages: Mapping[str, str], time: float) -> Look:
    """Add up the counters of pages in Prometheus' format, by URL. Raises ValueError if they have none of semmoe's."""
    totals: dict[tuple[str, Labels], float] = {}
    for url, text in pages.items():
        _add_samples(totals, text, url)
    if not any(name == "active" for name, _ in totals):
        raise ValueError(
            f"{', '.join(pages)} has metrics, but none of semmoe's: is the plug-in installed there (semmoe doctor), "
            "and the server started with a plan or SEMMOE_CONTROL?"
        )
    return Look(time, totals)


def _add_samples(totals: dict[tuple[str, Labels], float], text: str, url: str) -> None:
    """Add semmoe's counters on a page to `totals`. Raises ValueError that names the server and the line."""
    page = StringIO(text)
    try:
        for family in text_fd_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                if name.startswith(PREFIX):
                    key = name.removeprefix(PREFIX).removesuffix("_total"), frozenset(labels.items())
                    totals[key] = totals.get(key, 0.0) + value
    except (ValueError, IndexError, KeyError):
        lines = text[: page.tell()].removesuffix("\n").split("\n")
        raise ValueError(f"line {len(lines)} of the metrics of {url} cannot be read: {lines[-1][:80]!r}") from None


def view_window(looks: deque[Look], newest: Look, seconds: float) -> View:
    """Append a reading, drop those that are older than the window, and return what happened in it."""
    looks.append(newest)
    while len(looks) > 2 and looks[-1].time - looks[1].time >= seconds:
        looks.popleft()
    return view(looks[0], looks[-1])


def view(before: Look, after: Look) -> View:
    """Return the activity between two readings of a server; after a restart, since the server started."""
    restarted = any(after.totals.get(key, 0.0) < value for key, value in before.totals.items() if key[0] not in GAUGES)
    past: Totals = {} if restarted else before.totals
    grown = {key: value - past.get(key, 0.0) for key, value in after.totals.items() if key[0] not in GAUGES}
    seconds = max(after.time - before.time, 1e-9)
    local, pairs = _sum(grown, "pairs", local="true"), _sum(grown, "pairs")
    tokens, sent = _sum(grown, "routed_tokens"), _sum(grown, "all_to_all_bytes")
    served = _by(grown, "served_pairs", "by")
    mean = sum(served.values()) / max(len(served), 1)
    published = _by(grown, "publications", "process") if seconds > STALE_SECONDS else {}
    plans = sorted({f"{int(n):012x}" for (name, _), n in after.totals.items() if name == "plan_number" and n})

    def per_token(count: float) -> float | None:
        return count / tokens if tokens else None

    return View(
        seconds=seconds,
        active=_active(after, plans),
        ranks=int(_sum(after.totals, "active")),
        plans=plans,
        lar=local / pairs if pairs else None,
        pairs=int(pairs),
        routed_tokens_per_second=tokens / seconds,
        remote_ranks_per_token=per_token(_sum(grown, "remote_rows")),
        network_ranks_per_token=per_token(_sum(grown, "remote_rows", tier="network")),
        remote_nodes_per_token=per_token(_sum(grown, "node_rows")) if _by(grown, "node_rows") else None,
        remote_pairs_per_token=per_token(pairs - local),
        all_to_all_bytes_per_token=per_token(sent) if sent else None,
        node_pairs=_sent(grown, seconds),
        load={rank: count / mean for rank, count in served.items()} if mean else {},
        scheduled={rank: int(n) for rank, n in _by(grown, "scheduled_requests", "dp_rank", by="plan").items()},
        named=int(_sum(grown, "scheduled_requests", by="named")),
        by_engine=int(_sum(grown, "scheduled_requests", by="engine")),
        unknown_tokens=int(_sum(grown, "unknown_tokens")),
        schedule_failures=int(_sum(grown, "schedule_failures")),
        degraded=list(_by(after.totals, "degraded", "reason")),
        stale=[process for process, times in published.items() if times == 0],
    )


def _sent(grown: Totals, seconds: float) -> list[Sent]:
    """Traffic by pair of nodes, the heaviest first."""
    sizes, pairs = _by(grown, "node_bytes", "node", "to_node"), []
    for (source, target), count in _by(grown, "node_rows", "node", "to_node").items():
        size = sizes[source, target] / seconds if (source, target) in sizes else None
        pairs.append(Sent(source=source, target=target, rows_per_second=count / seconds, bytes_per_second=size))
    return sorted(pairs, key=lambda pair: -pair.rows_per_second)


def drift(seen: View, expected: float | None, margin: float) -> str | None:
    """A warning if the local activation rate is more than `margin` below what the plan expects, else None."""
    if not seen.below(expected, margin):
        return None
    return (
        f"local activation rate {seen.lar:.3f}, the plan expects {expected:.3f}: requests no longer resemble "
        "those that were profiled; record some (semmoe record) and solve again"
    )


def expected_lar(expected: Mapping[str, Any] | None) -> float | None:
    """The local activation rate that a plan expects; None if it expects none."""
    value = (expected or {}).get("lar")
    return float(value) if isinstance(value, (int, float)) else None


def _sum(totals: Totals, name: str, **wanted: str) -> float:
    return sum(_by(totals, name, **wanted).values())


def _by(totals: Totals, name: str, *by: str, **wanted: str) -> dict[Any, float]:
    """A counter by the value of a label, or by a tuple of several, in order of their numbers. wanted: labels it has."""
    out: dict[Any, float] = {}
    for (found, labels), value in totals.items():
        if found == name and wanted.items() <= labels:
            known = dict(labels)
            key = tuple(known[label] for label in by)
            out[key] = out.get(key, 0.0) + value
    ordered = sorted(out, key=lambda key: [(len(end), end) for end in key])
    return {key[0] if len(by) == 1 else key: out[key] for key in ordered}


def _active(look: Look, plans: list[str]) -> dict[str, str]:
    """The labels of a rank that runs the plug-in. They are of the start, so `plans`, if known, replaces the plan's."""
    labels = next((dict(sorted(labels)) for name, labels in look.totals if name == "active"), {})
    if _sum(look.totals, "swaps", outcome="done"):
        labels.pop("method", None)  # that of the first plan
    return labels | ({"plan": ", ".join(plans)} if plans else {})
