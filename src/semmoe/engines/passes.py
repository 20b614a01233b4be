"""Where the time of forward passes goes: in the expert all-to-all, in semmoe's other collectives, or elsewhere.

Seconds are by the host's clock, so they are correct on a CPU only, and are counted only where semmoe's own code sends
the all-to-all, which is there. The time in a collective includes waits for slower ranks.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from semmoe.engines.counters import Reading
from semmoe.runtime.collectives import Communicator, timed


class PassClock:
    """The seconds of one rank's forward passes, by part. A pass without tokens of this rank only waits for others, and
    is not counted.
    """

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def passing(
        self, dispatch: Sequence[Communicator], others: Sequence[Communicator], counted: bool = True
    ) -> Iterator[None]:
        """Enclose a forward pass; dispatch: the communicators of its expert all-to-all, others: semmoe's other ones."""
        if not (dispatch and counted):
            yield
            return
        before, passed = _waited(dispatch, others), Counter[str]()
        with timed(passed, "pass"):
            yield
        parts = {part: seconds - before[part] for part, seconds in _waited(dispatch, others).items()}
        self._seconds.update({**parts, "rest": passed["pass"] - sum(parts.values())})

    def readings(self, ep_rank: int) -> Iterator[Reading]:
        """Yield the seconds so far; the parts add up to the passes."""
        for part, seconds in dict(self._seconds).items():
            yield "pass_seconds", {"ep_rank": str(ep_rank), "part": part}, seconds


def _waited(dispatch: Sequence[Communicator], others: Sequence[Communicator]) -> dict[str, float]:
    parts = {"all_to_all": dispatch, "shuffle": others}
    return {part: sum(sum(comm.seconds.values()) for comm in comms) for part, comms in parts.items()}
