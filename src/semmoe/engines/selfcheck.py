"""Whether an adaptor's hooks run: an engine may compute a pass on a way of its own, around them and without a word.

check = SelfCheck()
check.expect("routed", 6)       # at the start: how often the hook runs in a pass, the model's number of layers
check.begin()                   # the first real pass starts: what ran in others, such as warm-up, is forgotten
check.ran("routed")             # in the hook
check.verdict()                 # it ended: "" or what did not run
"""

from collections import Counter
from collections.abc import Iterator

from semmoe.engines.counters import Reading


class SelfCheck:
    """One rank's. The first verdict stays; `degrade` adds other reasons, and `readings` tells all of them."""

    def __init__(self) -> None:
        self.pending = True  # until the first verdict
        self.reasons: list[str] = []
        self._expected: dict[str, int] = {}
        self._ran: Counter[str] = Counter()

    def expect(self, name: str, times: int) -> None:
        self._expected[name] = times

    def begin(self) -> None:
        self._ran.clear()

    def ran(self, name: str) -> None:
        self._ran[name] += 1

    def verdict(self) -> str:
        """Why the hooks cannot be trusted, in one line, or "". Once: later passes are not looked at."""
        if not self.pending:
            return ""
        self.pending = False
        wrong = [
            f"{name} {self._ran[name]} of {times} times"
            for name, times in self._expected.items()
            if self._ran[name] != times
        ]
        return self.degrade(f"in the first pass hooks ran: {', '.join(wrong)}") if wrong else ""

    def degrade(self, reason: str) -> str:
        """What this rank does not do as it should; returns the line to log, "" if that was said before."""
        line = " ".join(reason.split())
        if line in self.reasons:
            return ""
        self.reasons.append(line)
        return line

    def readings(self) -> Iterator[Reading]:
        for reason in self.reasons:
            yield "degraded", {"reason": reason}, 1.0
