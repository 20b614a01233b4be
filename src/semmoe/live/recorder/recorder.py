"""Record the routing of a live server, from inside its forward passes.

The rules: recording is off unless a control file turns it on; no error here reaches the server; memory and disk use are
bounded; a token is recorded once, however often it ran. An adaptor makes a `LiveRecorder` on a single rank of
each attention group, whose ranks see the same tokens:

    recorder = LiveRecorder(folder, fingerprint, rank)
    if recorder.recording:                         # every forward pass; a thread reads the control file
        recorder.observe(requests, rows)
    recorder.finish(request, prompt_ids)           # whenever a request ends; cheap while off
    recorder.close()

Two requests of a prompt "7 8 9" on a server with a prefix cache, chunks of two tokens and one preemption:

    pass 1   a: 7 at 0, 8 at 1
    pass 2   a: 9 at 2              b: 9 at 2     b's first two tokens were in the cache and did not run
    pass 3   a: 5 at 3                            a's first generated token
    pass 4   a: 7 at 0, 8 at 1      b: 6 at 3     a was preempted and starts again: nothing new of it
    pass 5   a: 9 at 2, 5 at 3
    pass 6   a: 4 at 4

    a's trace is 7 8 9 | 5 4 and b's is 9 | 6, prefill before the bar and decode behind it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from semmoe.engines.private import check_folder, open_folder
from semmoe.live.recorder.files import CONTROL, Control, Status, rank_folder, read_control, write_status
from semmoe.live.recorder.memory import MOST_POSITION, Memory, Rows
from semmoe.topology import Fingerprint
from semmoe.traces.trace import TraceHeader

LOOK_SECONDS = 0.2  # between reads of the control file
STATUS_LOOKS = 5  # looks between collecting requests that ended, which scans all rows, and writing the status
SAVE_LOOKS = 25  # looks between writes of the trace, since engines end ranks without notice
logger = logging.getLogger(__name__)


class LiveRecorder:
    """Records one run after another, as `folder/control.json` says; it never raises, and any failure ends the run.

    A thread looks at the control file, with traffic and without; watch: whether to start it.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, rank: int, watch: bool = True) -> None:
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.rank = rank
        self._lock = threading.Lock()
        self._looks = 0  # of this run
        self._closed = False
        self._status = Status(rank=rank)  # of the run that is on, or of the last one
        self._cpu_ns = 0  # CPU time of this run
        self._memory: Memory | None = None  # there is one while a run is on
        with self._guard():
            open_folder(self.folder)
            write_status(self.folder, self.status)
        if watch:
            threading.Thread(target=self._watch, name="semmoe-recorder", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(LOOK_SECONDS)
            self.look()

    @property
    def recording(self) -> bool:
        """Whether forward passes are to be observed now."""
        return self._memory is not None

    @property
    def status(self) -> Status:
        """The status that is, or will be, in the status file."""
        memory = self._memory
        if memory is None:
            return self._status
        cost = self._cpu_ns / 1e3 / max(1, self._status.tokens_seen)
        return self._status.model_copy(update=memory.usage() | {"cpu_us_per_token": round(cost, 3)})

    def look(self) -> None:
        """Act on the control file, and write a status or a shard that is due. Call it every LOOK_SECONDS."""
        with self._guard():
            if not self._closed:
                self._look()

    def observe(self, requests: Sequence[str], rows: Rows) -> None:
        """Record one forward pass of real tokens, without padding, rows of idle ranks and rejected draft tokens.

        rows.slots: the place in `requests` of each token's request. Arrays are copied.
        """
        with self._guard():
            if self._memory is not None:
                self._memory.observe(requests, rows)

    def finish(self, request: str, prompt_ids: Sequence[int] | np.ndarray, length: int = MOST_POSITION) -> None:
        """End a request, normally or not, after its last pass was observed; its recorded rows are written.

        length: number of tokens to keep; an engine that runs ahead of its results feeds one token beyond the end.
        """
        with self._guard():
            if self._memory is not None:
                self._memory.finish(request, np.asarray(prompt_ids).reshape(-1), length)

    def close(self) -> None:
        """Write finished requests and stop recording for good.

        Do not call it in a signal handler, since it may wait.
        """
        with self._guard():
            self._closed = True
            self._stop("the server ended")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Admit one caller at a time, count its CPU time, and end a run that is full or raises an exception."""
        with self._lock:
            begin = time.thread_time_ns()
            try:
                yield
                if self._memory is not None and self._memory.full:
                    self._stop()
            except Exception as error:
                self._fail(error)
            finally:
                self._cpu_ns += time.thread_time_ns() - begin

    def _look(self) -> None:
        """Act on the control file; one that is gone or unreadable turns recording off."""
        if not self.recording and not os.path.lexists(self.folder / CONTROL):
            return
        try:
            check_folder(self.folder)
            control = read_control(self.folder)
        except (ValueError, OSError) as error:
            if not self.recording:
                raise
            self._stop(str(error))
            return
        run = control.run if control.recording else None
        if run != self._status.run:  # a run that ended does not start again
            self._stop()
            if run is not None:
                self._start(control)
        if self._memory is not None:
            self._keep_up(self._memory)

    def _keep_up(self, memory: Memory) -> None:
        if self._looks % SAVE_LOOKS == SAVE_LOOKS - 1:
            memory.save()
        if self._looks % STATUS_LOOKS == 0:
            memory.write()
            with contextlib.suppress(OSError):  # a full disk ends the run when the trace is written
                write_status(self.folder, self.status)
        self._looks += 1

    def _start(self, control: Control) -> None:
        """Begin a run; if the server restarted during this run, append to its trace."""
        self._status = Status(rank=self.rank, run=control.run)
        self._cpu_ns = self._looks = 0
        path = rank_folder(self.folder, control.run, self.rank)
        open_folder(path.parent)
        open_folder(path)
        settings = {"run": control.run, "sample": control.sample}
        header = TraceHeader(fingerprint=self.fingerprint, dataset_hash=f"live:{control.run}", settings=settings)
        memory = Memory(control, self._status, path, header)
        self._status.state, self._memory = "recording", memory
        logger.warning("semmoe records the routing of requests in %s", path.parent)

    def _stop(self, reason: str = "") -> None:
        """End the run that is on, if any; reason: why, unless the control file says so or the run is full."""
        if self._memory is None:
            return
        self._memory.save()
        if self._memory.full:
            reason = f"max_tokens {self._memory.max_tokens} is reached"
        self._end("stopped", reason)

    def _fail(self, error: Exception) -> None:
        plain = isinstance(error, (ValueError, OSError)) and str(error)
        reason = " ".join((str(error) if plain else repr(error)).split())[:1000]
        if self.recording or self._status.reason != reason:  # a failure that repeats at every read is reported once
            self._end("failed", reason)

    def _end(self, state: str, reason: str) -> None:
        """Free the memory of the run and report why it ended."""
        update = {"state": state, "reason": reason, "bytes_held": 0}
        self._status, self._memory = self.status.model_copy(update=update), None
        with contextlib.suppress(OSError, ValueError):
            check_folder(self.folder)  # do not write to a folder that is refused
            write_status(self.folder, self.status)
        logger.warning("semmoe stopped recording: %s", reason or "as requested")
