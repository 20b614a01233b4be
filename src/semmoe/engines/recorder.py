"""Recording the routing of a live server, from inside its forward passes.

The rules: recording is off unless a control file turns it on; no error here reaches the server; memory and disk use are
bounded; a token is recorded once, however often it ran. An adaptor makes one `LiveRecorder` for each set of ranks
that see the same tokens (an attention group), on one of them:

    recorder = LiveRecorder(folder, fingerprint, rank)
    if recorder.poll():                            # every forward pass; a microsecond while off
        recorder.observe(requests, rows, positions, token_ids, expert_ids)
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
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from semmoe.engines.recorder_files import (
    CONTROL,
    Control,
    Status,
    check_folder,
    open_folder,
    read_control,
    write_status,
)
from semmoe.engines.recorder_session import Session
from semmoe.topology import Fingerprint

LOOK_SECONDS = 0.2  # between reads of the control file
STATUS_SECONDS = 1.0
COUNTS_SECONDS = 10.0  # between writes of counts, which a crash may lose
TRACE_SECONDS = 5.0  # between writes of a trace, since engines end ranks without notice
logger = logging.getLogger(__name__)


class LiveRecorder:
    """Records while `folder/control.json` says so; it never raises, and stops recording on any failure.

    While it records, a thread also reads the control file, so that a server without traffic stops recording when told
    to.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        watch: bool = True,
    ) -> None:
        self.folder, self.fingerprint, self.rank = Path(folder), fingerprint, rank
        self._clock, self._watch = clock, watch
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._status = Status(rank=rank)  # the status while nothing is recorded
        self._cpu_ns = 0  # CPU time of this run
        self._seen_control: tuple[int, ...] | None = None
        self._ended_run: str | None = None  # not started again when the control file is touched
        self._next_look = self._next_status = self._next_save = -math.inf
        self._closed = threading.Event()
        with self._guard():
            open_folder(self.folder)
            self._write_status()

    @property
    def recording(self) -> bool:
        return self._session is not None

    @property
    def status(self) -> Status:
        """The status that is, or will be, in the status file."""
        if self._session is None:
            return self._status
        return self._with_cost(self._session.status())

    def poll(self) -> bool:
        """Whether this forward pass is to be observed. Call it once per pass."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            with self._guard():
                self._look(now)
        return self._session is not None

    def observe(
        self,
        requests: Sequence[str],
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
        expert_ids: np.ndarray,
    ) -> None:
        """Record one forward pass of n real tokens, without padding, rows of idle ranks and rejected draft tokens.

        rows (n,): the place in `requests` of each token's request; positions (n,): its place in that request;
        token_ids (n,); expert_ids (n, L, K): logical experts by falling weight. Arrays are copied.
        """
        if self._session is None:
            return
        with self._guard():
            if self._session is not None:
                self._session.observe(requests, rows, positions, token_ids, expert_ids)
                self._stop_if_full()

    def finish(self, request: str, prompt_ids: Sequence[int] | np.ndarray, length: int | None = None) -> None:
        """End a request, normally or not, after its last pass was observed; its recorded rows are written.

        length: number of its tokens to keep; an engine that runs ahead of its own results feeds one beyond the end.
        """
        self._end(request, prompt_ids, length)

    def drop(self, request: str) -> None:
        """Forget what was recorded of a request."""
        self._end(request, None, None)

    def close(self) -> None:
        """Write finished requests and stop recording for good.

        Do not call it in a signal handler, since it may wait.
        """
        self._closed.set()
        with self._guard():
            self._next_look = math.inf
            if self._session is not None:
                self._stop("the server ended")

    def _end(self, request: str, prompt_ids: Sequence[int] | np.ndarray | None, length: int | None) -> None:
        if self._session is None:
            return
        with self._guard():
            if self._session is not None:
                self._session.finish(request, prompt_ids, length)
                self._stop_if_full()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Admit one caller at a time, count its CPU time, and turn an exception into the end of the recording."""
        with self._lock:
            begin = time.thread_time_ns()
            try:
                yield
            except Exception as error:
                self._fail(error)
            finally:
                self._cpu_ns += time.thread_time_ns() - begin

    def _look(self, now: float) -> None:
        signature = _signature(self.folder / CONTROL)
        if signature != self._seen_control:
            self._seen_control = signature
            self._obey(now)
        if self._session is not None:
            self._keep_up(now)

    def _obey(self, now: float) -> None:
        """Act on a control file that is new, gone or changed; an unreadable one turns recording off."""
        run, reason, control = None, "", None
        try:
            check_folder(self.folder)
            if self._seen_control is not None:
                control = read_control(self.folder)
                run = control.run if control.recording else None
        except (ValueError, OSError) as error:
            reason = str(error)
        if self._session is not None and run != self._session.control.run:
            self._stop(reason or ("" if control else f"{CONTROL} is gone"))
        elif reason:
            raise ValueError(reason)
        if control is not None and run not in (None, self._ended_run) and self._session is None:
            self._start(control, now)

    def _start(self, control: Control, now: float) -> None:
        self._cpu_ns, self._ended_run = 0, control.run
        self._status = Status(rank=self.rank, run=control.run, counts_only=control.counts_only)
        self._session = Session(self.folder, self.fingerprint, self.rank, control)
        self._next_status, self._next_save = now, now + self._save_seconds
        self._start_watching()
        logger.warning("semmoe records the routing of requests in %s", self.folder / control.run)

    @property
    def _save_seconds(self) -> float:
        return COUNTS_SECONDS if self._session is not None and self._session.control.counts_only else TRACE_SECONDS

    def _keep_up(self, now: float) -> None:
        assert self._session is not None
        if now >= self._next_save:
            self._next_save = now + self._save_seconds
            self._session.save()
            self._stop_if_full()
        if now >= self._next_status:
            self._next_status = now + STATUS_SECONDS
            with contextlib.suppress(OSError):  # a full disk does not end the recording
                self._write_status()

    def _stop_if_full(self) -> None:
        if self._session is not None and self._session.full:
            self._stop(self._session.full)

    def _stop(self, reason: str) -> None:
        assert self._session is not None
        self._session.save()
        lost = f"{self._session.stuck}; what was not on disk is lost" if self._session.stuck else ""
        self._status = self._final(self._session.status(), "stopped", lost or self._session.full or reason)
        self._session = None
        with contextlib.suppress(OSError):
            self._write_status()
        logger.warning("semmoe stopped recording: %s", self._status.reason or "it was told to stop")

    def _fail(self, error: Exception) -> None:
        plain = isinstance(error, (ValueError, OSError)) and str(error)
        reason = " ".join((str(error) if plain else repr(error)).split())[:1000]
        if self._session is None and self._status.reason == reason:
            return  # a failure that repeats at every read is reported once
        last = self._status
        with contextlib.suppress(Exception):
            last = self.status
        self._session, self._status = None, self._final(last, "failed", reason)
        with contextlib.suppress(Exception):
            check_folder(self.folder)  # do not write to a folder that is refused
            self._write_status()
        logger.warning("semmoe stopped recording: %s", reason)

    def _final(self, status: Status, state: str, reason: str) -> Status:
        update = {"state": state, "reason": reason, "bytes_held": 0}
        return self._with_cost(status).model_copy(update=update)

    def _with_cost(self, status: Status) -> Status:
        cost = round(self._cpu_ns / 1e3 / max(1, status.tokens_seen), 3)
        return status.model_copy(update={"rank": self.rank, "cpu_us_per_token": cost})

    def _write_status(self) -> None:
        write_status(self.folder, self.status.model_copy(update={"updated": round(time.time(), 3)}))

    def _start_watching(self) -> None:
        if self._watch:
            threading.Thread(target=self._watch_control, name="semmoe-recorder", daemon=True).start()

    def _watch_control(self) -> None:
        """Read the control file while no forward pass does; ends with the recording."""
        while self._session is not None and not self._closed.wait(2 * LOOK_SECONDS):
            self.poll()


def _signature(path: Path) -> tuple[int, ...] | None:
    """Values that change when a file is replaced or written; None if there is no file."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size, info.st_mode, info.st_uid
