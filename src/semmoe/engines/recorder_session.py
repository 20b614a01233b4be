"""One recording on one rank, from start to stop. It may raise any exception, which `LiveRecorder` catches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from semmoe.core import DECODE, PREFILL
from semmoe.engines.recorder_files import Control, Status, check_folder, counts_path, make_private, rank_folder
from semmoe.engines.recorder_rows import REFUSED, SLOTS, Counts, Requests, Rows, RowStore, outside, row_bytes
from semmoe.files import NO_ROOM, array_shape, load_arrays, save_arrays, save_json
from semmoe.routing import impossible_tokens
from semmoe.topology import Fingerprint
from semmoe.trace import TraceHeader, TraceWriter, shard_paths

COUNTS = {"activations", "transitions", "tokens"}
NEVER = 1 << 62  # tokens per shard for the writer, because this module decides when a shard is written
SHARD_TOKENS = 1 << 14  # small, so that writing one delays a server by only about 10 ms
MOST_POSITION = np.iinfo(np.int32).max
# finished requests are written when they hold 1/16 of the rows in memory, since each write scans all rows
WRITE_SHARE = 16


class Session:
    """Collects the rows of sampled requests for a trace, or their counts."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, rank: int, control: Control) -> None:
        self.fingerprint, self.control = fingerprint, control
        self.full = ""  # why nothing more is recorded
        self.stuck = ""  # why nothing can be written now
        self.written = self.tokens = self.seen = self.dropped = self.unknown = 0
        self._requests = Requests(control.sample)
        self._finished: dict[int, tuple[np.ndarray, int] | None] = {}  # prompt and length by slot; None: not written
        self._weight = 0  # number of rows and prompt tokens of finished requests
        self._counts_path = counts_path(folder, control.run, rank)
        make_private(folder / control.run)
        check_folder(folder / control.run)
        settings = {"run": control.run, "sample": control.sample}
        self._header = TraceHeader(fingerprint=fingerprint, dataset_hash=f"live:{control.run}", settings=settings)
        self._counts = self._open_counts() if control.counts_only else None
        if not control.counts_only:
            self._open_trace(rank_folder(folder, control.run, rank))

    def _open_counts(self) -> Counts:
        needed = Counts.bytes_needed(self.fingerprint)
        if needed > self._bytes:
            raise ValueError(f"counts need {-(-needed // 10**6)} MB, and max_mb is {self.control.max_mb}")
        if self._counts_path.exists():
            raise ValueError(f"{self._counts_path} exists: start another run")
        save_json(self._counts_path.with_suffix(".json"), self._header, private=True)
        return Counts(self.fingerprint)

    def _open_trace(self, path: Path) -> None:
        """Open the trace. A quarter of the memory, at most one shard, is for finished rows that wait to be written."""
        rows = self._bytes // row_bytes(self.fingerprint)
        shard = min(SHARD_TOKENS, rows // 4)
        if shard < 1:
            raise ValueError(f"max_mb {self.control.max_mb} is too little for a row")
        make_private(path)
        check_folder(path)
        self._store, self._shard = RowStore(self.fingerprint, rows - shard), shard
        self._writer = TraceWriter(path, self._header, shard_tokens=NEVER, private=True)
        # Requests of this run from before the server restarted.
        self.written = self._writer.num_requests
        self.tokens = sum(array_shape(shard, "token_ids")[0] for shard in shard_paths(path))

    @property
    def _bytes(self) -> int:
        return self.control.max_mb * 10**6

    def observe(
        self,
        requests: Sequence[str],
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
        expert_ids: np.ndarray,
    ) -> None:
        self.seen += len(rows)
        new = self._new(requests, Rows(rows, positions, token_ids, expert_ids))
        if len(new) == 0:
            return
        if self._counts is not None:
            new = self._possible(new).where(slice(self.control.max_tokens - self.tokens))
            self._counts.add(new.expert_ids)
            self.tokens += len(new)
            self._check_full()
        else:
            new = self._fit(new)
            self._store.put(new)
        self._requests.advance(new)

    def _new(self, requests: Sequence[str], rows: Rows) -> Rows:
        """The valid rows of recorded requests that are not yet recorded, each once."""
        f = self.fingerprint
        shapes = (len(rows.positions), len(rows.token_ids), rows.expert_ids.shape)
        expected = (len(rows), len(rows), (len(rows), f.num_layers, f.top_k))
        if shapes != expected:
            raise ValueError(f"positions, token_ids, expert_ids have {shapes}, expected {expected}")
        rows = self._known(rows, rows.slots, len(requests))
        rows = self._known(rows, rows.positions, MOST_POSITION)
        slots = self._requests.slots(requests)[rows.slots]
        rows = replace(rows, slots=slots, positions=rows.positions.astype(np.int64, copy=False))
        beyond = rows.positions > self._requests.highest[slots]
        rows = _once(rows if beyond.all() else rows.where(beyond))
        rows = self._known(rows, rows.token_ids, f.vocab_size)
        return self._known(rows, rows.expert_ids, f.num_experts)

    def _known(self, rows: Rows, ids: np.ndarray, size: int) -> Rows:
        """Remove and count the rows that have one of their ids (n, ...) outside 0 to size - 1."""
        bad = outside(ids, size)
        if bad is None:
            return rows
        self.unknown += int(bad.sum())
        return rows.where(~bad)

    def _possible(self, rows: Rows) -> Rows:
        """Remove and count the rows that name an expert twice; those of a trace are left out where it is read."""
        impossible = impossible_tokens(rows.expert_ids)
        self.unknown += int(impossible.sum())
        return rows.where(~impossible)

    def _fit(self, rows: Rows) -> Rows:
        """The rows that fit in memory: requests without rows are refused first, then those with most rows dropped."""
        if len(rows) > self._store.free:
            self._write_finished()
        if len(rows) > self._store.free:
            new = np.unique(rows.slots[self._requests.rows[rows.slots] == 0])
            self._requests.skipped += len(new)
            rows = self._refuse(new, rows)
        while len(rows) > self._store.free:
            self.dropped += 1
            rows = self._refuse(np.array([self._requests.rows.argmax()]), rows)
        return rows

    def _refuse(self, slots: np.ndarray, rows: Rows) -> Rows:
        for slot in slots.tolist():
            self._requests.refuse(slot)
            self._finished[slot] = None
        self._write_finished()
        return rows.where(~np.isin(rows.slots, slots))

    def finish(self, request: str, prompt_ids: Sequence[int] | np.ndarray | None, length: int | None = None) -> None:
        """End a request: its rows before `length` are queued for writing, or forgotten if there is no prompt."""
        slot = self._requests.end(request)
        if slot == REFUSED:
            return
        rows = int(self._requests.rows[slot])
        if self._counts is not None:
            self._requests.release([slot])
            self.written += rows > 0
            return
        self.dropped += prompt_ids is None
        most = MOST_POSITION if length is None else length
        self._finished[slot] = None if prompt_ids is None or rows == 0 else (np.asarray(prompt_ids).reshape(-1), most)
        self._weight += rows + (0 if prompt_ids is None else len(prompt_ids))
        few = max(SHARD_TOKENS // 2, self._store.used // WRITE_SHARE)
        if self._weight >= few or len(self._finished) >= SLOTS // 4:
            self._write_finished()

    def _write_finished(self) -> None:
        if not self._finished:
            return
        turn = np.full(SLOTS + 1, -1, np.int64)
        turn[list(self._finished)] = np.arange(len(self._finished))
        rows = self._store.pop(turn)
        bounds = np.searchsorted(turn[rows.slots], np.arange(len(self._finished) + 1))
        for i, ended in enumerate(self._finished.values()):
            if ended is not None:
                own = rows.where(slice(bounds[i], bounds[i + 1]))
                self._write(ended[0], own.where(own.positions < ended[1]))
        self._requests.release(list(self._finished))
        self._finished, self._weight = {}, 0

    def _write(self, prompt: np.ndarray, rows: Rows) -> None:
        if self.full or self.tokens + len(rows) > self.control.max_tokens:
            self.dropped += 1
            self._note_full()
            return
        if self._writer.pending_tokens >= self._shard:
            self._flush()
        if self._writer.pending_tokens >= self._shard:  # writing failed before, and memory is bounded
            self.dropped += 1
            return
        bad = outside(prompt, self.fingerprint.vocab_size) if len(prompt) else None
        self.unknown += 0 if bad is None else int(bad.sum())
        self._writer.append(
            prompt_ids=prompt if bad is None else prompt[~bad],
            token_ids=rows.token_ids,
            expert_ids=rows.expert_ids,
            phase=np.where(rows.positions < len(prompt), PREFILL, DECODE),
        )
        self.written += 1
        self.tokens += len(rows)
        self._check_full()

    def _check_full(self) -> None:
        if self.tokens >= self.control.max_tokens:
            self._note_full()

    def _note_full(self) -> None:
        self.full = f"max_tokens {self.control.max_tokens} is reached"

    def save(self) -> None:
        """Write finished requests to disk; what does not fit there is kept for the next attempt."""
        if self._counts is None:
            self._write_finished()
        self._flush()

    def _flush(self) -> None:
        try:
            if self._counts is not None:
                save_arrays(self._counts_path, self._counts.arrays(), private=True)
            else:
                self._writer.flush()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.stuck = f"nothing can be written now: {error}"
        else:
            self.stuck = ""

    def status(self) -> Status:
        return Status(
            rank=0,
            run=self.control.run,
            state="recording",
            reason=(self.full or self.stuck)[:1000],
            counts_only=self.control.counts_only,
            requests=self.written,
            tokens=self.tokens,
            tokens_seen=self.seen,
            skipped=self._requests.skipped,
            dropped=self.dropped,
            unfinished=len(self._requests),
            unknown=self.unknown,
            bytes_held=self._store.used * self._store.row_bytes if self._counts is None else self._counts.nbytes,
        )


def _once(rows: Rows) -> Rows:
    """Remove rows that repeat a position of their request."""
    key = (rows.slots << 32) | rows.positions
    ordered = np.sort(key)
    if (ordered[1:] != ordered[:-1]).all():
        return rows
    return rows.where(np.sort(np.unique(key, return_index=True)[1]))


def load_counts(path: Path) -> dict[str, np.ndarray]:
    return load_arrays(path, COUNTS)
