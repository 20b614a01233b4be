"""A running server, as the loop needs it: its counters, its recorder, and swaps of its plan."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from semmoe import watch
from semmoe.client import PLAIN, Client
from semmoe.core import Plan
from semmoe.engines.live.files import read_status
from semmoe.engines.recorder import control as recorder_control
from semmoe.engines.recorder.files import read_control
from semmoe.live import ServerError, swap
from semmoe.settings import AdaptSettings, RecordSettings, SwapSettings

STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    """url: of the server; folder: its control folder; client: how it is asked."""

    url: str
    folder: Path
    settings: AdaptSettings
    client: Client = PLAIN

    def look(self) -> watch.Look:
        """Its counters now. Raises ValueError if it does not answer."""
        return watch.look([self.url], time.monotonic(), self.client)

    def begin_recording(self) -> None:
        """Raises ValueError if it cannot record, or records already."""
        recorder_control.begin(self.folder, replace(RecordSettings(), max_tokens=10_000_000))

    def recorded(self) -> int:
        """Requests that the ranks of this node have recorded in this run."""
        run = read_control(self.folder).run
        return sum(status.requests for status in recorder_control.of_run(self.folder, run))

    def end_recording(self, target: Path) -> int:
        """Write a trace to `target`; returns its requests."""
        return recorder_control.end(self.folder, target, STOP_SECONDS).merged.requests

    def expert_bytes(self) -> int:
        """What rank 0 says that one expert of one layer takes."""
        return read_status(self.folder).expert_bytes

    def swap(self, plan: Plan) -> str:
        """Swap; why the plan is not served now, or ""."""
        asked = SwapSettings(layers_per_pass=self.settings.layers_per_pass)
        try:
            status = swap(self.url, self.folder, plan, asked, self.client)
        except (ValueError, ServerError) as error:
            return str(error)
        return "" if status.state == "done" else f"the swap was {status.state}: {status.reason}"
