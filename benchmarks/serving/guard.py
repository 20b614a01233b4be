"""Whether others take the cores that are being measured: processes outside the benchmark's own tree, from /proc."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
LIMIT = 0.05  # of a core, all others together
SHOWN, MOST = 0.005, 8  # of a core, from which a process is named; of them
KERNEL = 2  # parent of the kernel's threads, which emulate the links
STEAL = "(taken by the host of this virtual machine)"


class BusyError(Exception):
    """Who takes the cores."""


@dataclass(frozen=True)
class Process:
    name: str
    parent: int
    ticks: int


@dataclass(frozen=True)
class Snapshot:
    seconds: float
    processes: dict[int, Process]
    stolen: int  # ticks


def parse(text: str) -> Process:
    """A line of /proc/PID/stat; the name may hold spaces and brackets."""
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(name, int(fields[1]), int(fields[11]) + int(fields[12]))


def snapshot() -> Snapshot:
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return Snapshot(time.monotonic(), dict(_processes()), stolen)


def _processes() -> Iterator[tuple[int, Process]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            yield int(path.name), parse((path / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue


def tree(processes: dict[int, Process], root: int) -> set[int]:
    """The process and all that descend from it."""
    found = {root}
    while more := {pid for pid, p in processes.items() if p.parent in found} - found:
        found |= more
    return found


def others(before: Snapshot, after: Snapshot, root: int) -> dict[str, float]:
    """Cores that each process took that neither descends from `root` nor is the kernel's."""
    own = tree(before.processes, root) | tree(after.processes, root) | tree(after.processes, KERNEL)
    spent = {
        f"{p.name} ({pid})": p.ticks - _ticks(before, pid, p) for pid, p in after.processes.items() if pid not in own
    }
    spent[STEAL] = after.stolen - before.stolen
    scale = TICKS * (after.seconds - before.seconds)
    return {name: ticks / scale for name, ticks in spent.items() if ticks > 0}


def _ticks(before: Snapshot, pid: int, now: Process) -> int:
    """What it had spent before; a process of another name is another one."""
    then = before.processes.get(pid)
    return then.ticks if then is not None and then.name == now.name else 0


def told(found: dict[str, float]) -> list[str]:
    """Names and shares of a core, the largest first, if they take more than the limit together; else nothing."""
    if sum(found.values()) <= LIMIT:
        return []
    rows = sorted(found.items(), key=lambda item: -item[1])
    return [f"{name}: {share:.0%} of a core" for name, share in rows[:MOST] if share >= SHOWN]


def since(before: Snapshot) -> list[str]:
    """Who has disturbed this process and its descendants since a snapshot."""
    return told(others(before, snapshot(), os.getpid()))


def check(seconds: float = 2.0, patience: float = 60.0) -> None:
    """Wait for idle cores. Raises BusyError if others still take them when patience ends."""
    end = time.monotonic() + patience
    while True:
        before = snapshot()
        time.sleep(seconds)
        found = since(before)
        if not found:
            return
        if time.monotonic() > end:
            raise BusyError("others take the cores that are to be measured: " + "; ".join(found))
