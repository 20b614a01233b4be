"""Hold the requests of a run, their progress and their rows, within a bounded memory.

All arrays have a fixed size and are updated by whole batches: nothing here loops over tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from semmoe.core import DECODE, PREFILL
from semmoe.live.recorder.files import Control, Status
from semmoe.topology import Fingerprint
from semmoe.traces.trace import TraceHeader, TraceWriter, num_tokens

SLOTS = 1 << 16  # most unfinished requests at a time; further ones are skipped
REFUSED = SLOTS  # the slot of every request that is not recorded
MOST_REFUSED = 1 << 17  # most ids of refused requests that are remembered
MOST_POSITION = np.iinfo(np.int32).max
SHARD_TOKENS = 1 << 14  # small, so that writing one delays a server by only about 10 ms
ROW_OVERHEAD = 3 * 4  # bytes per row beside its experts: token, position and slot


@dataclass(frozen=True)
class Rows:
    """n tokens of a forward pass or of a request, of any integer type."""

    slots: np.ndarray  # (n,) the slot of each token's request; at first its place among the requests of the pass
    positions: np.ndarray  # (n,) place in the request
    token_ids: np.ndarray  # (n,)
    expert_ids: np.ndarray  # (n, L, K) logical experts by falling weight

    def __len__(self) -> int:
        return len(self.slots)

    def where(self, chosen: np.ndarray | slice) -> Rows:
        """The rows selected by a mask (n,), by indices, or by a slice."""
        return Rows(*(array[chosen] for array in vars(self).values()))

    def known(self, name: str, size: int) -> Rows:
        """The rows whose ids in the array `name` are all from 0 to size - 1."""
        return self.where(within(getattr(self, name), size))

    def once(self) -> Rows:
        """These rows without those that repeat a position of their request."""
        key = (self.slots << 32) | self.positions
        ordered = np.sort(key)
        if (ordered[1:] != ordered[:-1]).all():
            return self
        return self.where(np.sort(np.unique(key, return_index=True)[1]))


def within(ids: np.ndarray, size: int) -> np.ndarray | slice:
    """The rows of `ids` (n, ...) whose ids are all from 0 to size - 1: a mask (n,), or a slice of all rows."""
    if ids.size == 0:
        return slice(None)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"ids are {ids.dtype}, expected integers")
    if ids.min() >= 0 and ids.max() < size:
        return slice(None)
    good = (ids >= 0) & (ids < size)
    return np.asarray(good.reshape(len(ids), -1).all(axis=1))


def sampled(request: str, share: float) -> bool:
    """Whether a request belongs to the recorded `share`: decided by a hash, so that all ranks agree."""
    digest = hashlib.blake2b(str(request).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class Requests:
    """The slot of each unfinished request, and the highest position that was recorded of it."""

    def __init__(self, share: float) -> None:
        self.share, self.skipped = share, 0
        self.highest = np.full(SLOTS + 1, -1, np.int64)
        self.highest[REFUSED] = np.iinfo(np.int64).max  # every row of a refused request counts as already recorded
        self.rows = np.zeros(SLOTS + 1, np.int64)  # rows recorded of each request
        self._slot: dict[str, int] = {}
        self._name: dict[int, str] = {}
        self._free = list(range(SLOTS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._name)

    def slots(self, requests: Sequence[str]) -> np.ndarray:
        """(len(requests),) int64: the slot of each request; new requests are accepted or refused for good."""
        if len(self._slot) - len(self._name) > MOST_REFUSED:
            self._slot = {name: slot for slot, name in self._name.items()}
        known = self._slot
        return np.array([known[r] if r in known else self._admit(r) for r in requests], np.int64)

    def _admit(self, request: str) -> int:
        slot = REFUSED
        if sampled(request, self.share):
            if self._free:
                slot = self._free.pop()
                self._name[slot] = request
            else:
                self.skipped += 1
        self._slot[request] = slot
        return slot

    def advance(self, rows: Rows) -> None:
        np.maximum.at(self.highest, rows.slots, rows.positions)
        np.add.at(self.rows, rows.slots, 1)

    def refuse(self, slot: int) -> None:
        """Record no more of this request; its slot stays taken until it is released."""
        self._slot[self._name.pop(slot)] = REFUSED

    def end(self, request: str) -> int:
        """Forget the name of a request that ends; returns its slot, which stays taken, or REFUSED."""
        slot = self._slot.pop(request, REFUSED)
        self._name.pop(slot, None)
        return slot

    def release(self, slots: list[int]) -> None:
        self.highest[slots] = -1
        self.rows[slots] = 0
        self._free.extend(slots)


class RowStore:
    """Rows of unfinished requests, at most `capacity`; only rows in use take memory.

    Rows lie in any order; those of a request are found by a scan when it is written.
    """

    def __init__(self, fingerprint: Fingerprint, capacity: int) -> None:
        f = fingerprint
        self.capacity, self.used = capacity, 0
        slots, positions, token_ids = (np.empty(capacity, np.int32) for _ in range(3))
        self._held = Rows(slots, positions, token_ids, np.empty((capacity, f.num_layers, f.top_k), expert_dtype(f)))

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def put(self, rows: Rows) -> None:
        assert len(rows) <= self.free
        end = self.used + len(rows)
        for held, new in zip(vars(self._held).values(), vars(rows).values(), strict=True):
            held[self.used : end] = new
        self.used = end

    def pop(self, slots: Sequence[int]) -> list[Rows]:
        """Remove and return the rows of each slot, by position."""
        turn = np.full(SLOTS + 1, -1, np.int64)  # of each slot, its place in `slots`
        turn[list(slots)] = np.arange(len(slots))
        turns = turn[self._held.slots[: self.used]]
        at = np.flatnonzero(turns >= 0)
        at = at[np.lexsort((self._held.positions[at], turns[at]))]
        rows = self._held.where(at)
        bounds = np.searchsorted(turns[at], np.arange(len(slots) + 1))
        self._close(at)
        return [rows.where(slice(first, last)) for first, last in itertools.pairwise(bounds)]

    def _close(self, gone: np.ndarray) -> None:
        """Fill the places of rows that are gone with the last rows."""
        self.used -= len(gone)
        last = np.setdiff1d(np.arange(self.used, self.used + len(gone)), gone, assume_unique=True)
        for held in vars(self._held).values():
            held[gone[gone < self.used]] = held[last]


def row_bytes(fingerprint: Fingerprint) -> int:
    experts = fingerprint.num_layers * fingerprint.top_k * expert_dtype(fingerprint).itemsize
    return experts + ROW_OVERHEAD


def expert_dtype(fingerprint: Fingerprint) -> np.dtype:
    return np.dtype(np.uint8 if fingerprint.num_experts <= 256 else np.int16)


class Memory:
    """The rows of sampled requests until these have ended, within `control.max_mb`, and the trace that they go to.

    Requests that ended are written together; a quarter of the memory, at most one shard, is for rows that wait for the
    disk. `status` counts the requests and rows that are recorded, and those that are left out.
    """

    def __init__(self, control: Control, status: Status, path: Path, header: TraceHeader) -> None:
        self._fingerprint = header.fingerprint
        capacity = control.max_mb * 10**6 // row_bytes(self._fingerprint)
        shard_tokens = min(SHARD_TOKENS, capacity // 4)
        if shard_tokens < 1:
            raise ValueError(f"max_mb {control.max_mb} is too little for a row")
        self.max_tokens, self.full = control.max_tokens, False  # whether the limit is reached
        self._writer = TraceWriter(path, header, shard_tokens, private=True)
        self._status = status
        status.requests = self._writer.num_requests  # not 0 if the server restarted during this run
        status.tokens = num_tokens(path)
        self._requests = Requests(control.sample)
        self._store = RowStore(self._fingerprint, capacity - shard_tokens)
        self._finished: dict[int, tuple[np.ndarray, int]] = {}  # prompt and length by slot

    def usage(self) -> dict[str, int]:
        """Fields of a status."""
        held = self._store.used * row_bytes(self._fingerprint)
        return {"skipped": self._requests.skipped, "unfinished": len(self._requests), "bytes_held": held}

    def observe(self, requests: Sequence[str], rows: Rows) -> None:
        """Hold the rows of a pass whose `slots` are places in `requests`."""
        new = self._fit(self._new(requests, rows))
        self._store.put(new)
        self._requests.advance(new)

    def _new(self, requests: Sequence[str], rows: Rows) -> Rows:
        """The valid rows of sampled requests that are not yet held, each once."""
        f = self._fingerprint
        shapes = (len(rows.positions), len(rows.token_ids), rows.expert_ids.shape)
        expected = (len(rows), len(rows), (len(rows), f.num_layers, f.top_k))
        if shapes != expected:
            raise ValueError(f"positions, token_ids, expert_ids have {shapes}, expected {expected}")
        known = rows.known("slots", len(requests)).known("positions", MOST_POSITION)
        slots = self._requests.slots(requests)[known.slots]
        placed = replace(known, slots=slots, positions=known.positions.astype(np.int64, copy=False))
        beyond = placed.positions > self._requests.highest[slots]
        new = (placed if beyond.all() else placed.where(beyond)).once()
        valid = new.known("token_ids", f.vocab_size).known("expert_ids", f.num_experts)
        self._status.tokens_seen += len(rows)
        self._status.unknown += len(rows) - len(known) + len(new) - len(valid)
        return valid

    def _fit(self, rows: Rows) -> Rows:
        """The rows that fit in memory: requests without rows are skipped first, then those with most rows dropped."""
        if len(rows) > self._store.free:
            self.write()
        if len(rows) > self._store.free:
            slots = np.unique(rows.slots[self._requests.rows[rows.slots] == 0])
            self._requests.skipped += len(slots)
            rows = self._refuse(slots, rows)
        while len(rows) > self._store.free:
            self._status.dropped += 1
            rows = self._refuse(np.array([self._requests.rows.argmax()]), rows)
        return rows

    def _refuse(self, slots: np.ndarray, rows: Rows) -> Rows:
        """Hold nothing of the requests in these slots any more; returns the rows of others."""
        self._store.pop(slots.tolist())
        for slot in slots.tolist():
            self._requests.refuse(slot)
        self._requests.release(slots.tolist())
        return rows.where(~np.isin(rows.slots, slots))

    def finish(self, request: str, prompt: np.ndarray, length: int) -> None:
        """End a request, whose rows before `length` are written next."""
        slot = self._requests.end(request)
        if slot != REFUSED:
            self._finished[slot] = prompt, length

    def save(self) -> None:
        """Write finished requests to disk."""
        self.write()
        self._writer.flush()

    def write(self) -> None:
        """Move the rows of finished requests to the trace's next shard, and forget these requests."""
        if not self._finished:  # all rows need not be scanned
            return
        finished, self._finished = self._finished, {}
        parts = self._store.pop(list(finished))
        self._requests.release(list(finished))
        for (prompt, length), rows in zip(finished.values(), parts, strict=True):
            if len(rows):
                self._append(prompt, rows.where(rows.positions < length))

    def _append(self, prompt: np.ndarray, rows: Rows) -> None:
        """Append a request to the trace, unless it then held more than `max_tokens`."""
        status = self._status
        self.full |= status.tokens + len(rows) > self.max_tokens
        if self.full:
            status.dropped += 1
            return
        known = prompt[within(prompt, self._fingerprint.vocab_size)]
        status.unknown += len(prompt) - len(known)
        self._writer.append(
            prompt_ids=known,
            token_ids=rows.token_ids,
            expert_ids=rows.expert_ids,
            phase=np.where(rows.positions < len(prompt), PREFILL, DECODE),
        )
        status.requests += 1
        status.tokens += len(rows)
        self.full = status.tokens >= self.max_tokens
