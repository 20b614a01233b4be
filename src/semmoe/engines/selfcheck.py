"""Check that an adaptor's hooks run, since an engine may silently compute a pass on a path that bypasses them.

check = SelfCheck()
check.expect("routed", 6)       # at the start: how often the hook runs per pass, here once per layer
check.begin()                   # the first real pass starts: counts of earlier passes, such as warm-up, are reset
check.ran("routed")             # in the hook
check.verdict()                 # the pass ended: "" or what did not run, for `degrade`
"""

from collections import Counter
from collections.abc import Iterator

from semmoe.engines.counters import Reading


class SelfCheck:
    """The check of a rank. Only the first pass is judged; `degrade` keeps reasons, and `readings` lists them."""

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
        """Why the hooks cannot be trusted, in one line, or "". Only the first pass is checked."""
        if not self.pending:
            return ""
        self.pending = False
        wrong = [
            f"{name} {self._ran[name]} of {times} times"
            for name, times in self._expected.items()
            if self._ran[name] != times
        ]
        return f"in the first pass hooks ran: {', '.join(wrong)}" if wrong else ""

    def degrade(self, reason: str) -> str:
        """Add a reason why this rank is degraded; returns the line to log, or "" if the reason is already known."""
        line = " ".join(reason.split())
        if line in self.reasons:
            return ""
        self.reasons.append(line)
        return line

    def readings(self) -> Iterator[Reading]:
        for reason in self.reasons:
            yield "degraded", {"reason": reason}, 1.0
