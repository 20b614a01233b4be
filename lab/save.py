"""Write a trace that is in memory to a directory, as experiments and tests do; `semmoe` writes traces as they come."""

from pathlib import Path

from semmoe.core import RoutingTrace
from semmoe.traces.trace import TraceHeader, TraceWriter


def save_trace(trace: RoutingTrace, path: Path) -> None:
    """Write a trace to a new trace directory. Raises ValueError if there is one."""
    header = TraceHeader(fingerprint=trace.fingerprint, dataset_hash=trace.digest(), settings={})
    with TraceWriter(path, header) as writer:
        if writer.num_requests != 0:
            raise ValueError(f"{path} already holds a trace")
        for request in range(trace.num_requests):
            writer.append_one(trace, request)
