"""What a live recorder holds in memory: the requests it records with their progress, their rows, and counts.

All arrays have a fixed size and are updated by whole batches: nothing here loops over tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semmoe.topology import Fingerprint

SLOTS = 1 << 16  # most unfinished requests at a time; further ones are skipped
REFUSED = SLOTS  # the slot of every request that is not recorded
MOST_REFUSED = 1 << 17  # most ids of refused requests that are remembered
FOLD_ROWS = 2048  # tokens whose routing is counted at a time


@dataclass(frozen=True)
class Rows:
    """n tokens of recorded requests."""

    slots: np.ndarray  # (n,) the slot of each token's request
    positions: np.ndarray  # (n,) place in the request
    token_ids: np.ndarray  # (n,)
    expert_ids: np.ndarray  # (n, L, K)

    def __len__(self) -> int:
        return len(self.slots)

    def where(self, chosen: np.ndarray | slice) -> Rows:
        """The rows selected by a mask (n,), by indices, or by a slice."""
        return Rows(self.slots[chosen], self.positions[chosen], self.token_ids[chosen], self.expert_ids[chosen])


def outside(ids: np.ndarray, size: int) -> np.ndarray | None:
    """(n,) bool: rows of `ids` (n, ...) that contain an id outside 0 to size - 1; None if no row does."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"ids are {ids.dtype}, expected integers")
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < size):
        return None
    bad = (ids < 0) | (ids >= size)
    return np.asarray(bad.reshape(len(ids), -1).any(axis=1))


def sampled(request: str, share: float) -> bool:
    """Whether a request belongs to the recorded `share`: decided by a hash, so that all ranks agree."""
    if share >= 1:
        return True
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
        known = self._slot.get
        slots = [known(request) for request in requests]
        if None in slots:
            slots = [self._admit(r) if slot is None else slot for r, slot in zip(requests, slots, strict=True)]
        return np.array(slots, np.int64)

    def _admit(self, request: str) -> int:
        if request in self._slot:  # it may occur twice in one batch
            return self._slot[request]
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

    Rows are stored at any free place; those of a request are found by a scan when it is written.
    """

    # bytes per row in addition to its experts: token, position, slot, and place in the list of free rows
    OVERHEAD = 4 * 4

    def __init__(self, fingerprint: Fingerprint, capacity: int) -> None:
        self._shape = (fingerprint.num_layers, fingerprint.top_k)
        self.row_bytes = row_bytes(fingerprint)
        self.capacity, self.used = capacity, 0
        self._token_ids = np.empty(capacity, np.int32)
        self._positions = np.empty(capacity, np.int32)
        self._slots = np.empty(capacity, np.int32)
        self._experts = np.empty((capacity, math.prod(self._shape)), expert_dtype(fingerprint))
        self._returned = np.empty(capacity, np.int32)  # a stack of rows that were in use
        self._num_returned, self._touched = 0, 0  # rows from `_touched` on were never in use

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def put(self, rows: Rows) -> None:
        at = self._take(len(rows))
        self._token_ids[at] = rows.token_ids
        self._positions[at] = rows.positions
        self._slots[at] = rows.slots
        self._experts[at] = rows.expert_ids.reshape(len(rows), self._experts.shape[1])

    def _take(self, n: int) -> np.ndarray | slice:
        assert n <= self.free
        again = min(n, self._num_returned)
        self.used += n
        self._num_returned -= again
        self._touched += n - again
        fresh = slice(self._touched - (n - again), self._touched)
        if again == 0:
            return fresh
        old = self._returned[self._num_returned : self._num_returned + again]
        return np.concatenate([old, np.arange(fresh.start, fresh.stop, dtype=np.int32)])

    def pop(self, turn: np.ndarray) -> Rows:
        """Remove and return the rows of slots whose `turn` (SLOTS + 1,) is not negative, by turn and then position."""
        turns = turn[self._slots[: self._touched]]
        at = np.flatnonzero(turns >= 0).astype(np.int32)
        at = at[np.lexsort((self._positions[at], turns[at]))]
        experts = self._experts[at].reshape(-1, *self._shape)
        rows = Rows(self._slots[at], self._positions[at], self._token_ids[at], experts)
        self._slots[at] = REFUSED  # these rows belong to no request
        self._returned[self._num_returned : self._num_returned + len(at)] = at
        self._num_returned += len(at)
        self.used -= len(at)
        return rows


def row_bytes(fingerprint: Fingerprint) -> int:
    experts = fingerprint.num_layers * fingerprint.top_k * expert_dtype(fingerprint).itemsize
    return experts + RowStore.OVERHEAD


def expert_dtype(fingerprint: Fingerprint) -> np.dtype:
    return np.dtype(np.uint8 if fingerprint.num_experts <= 256 else np.int16)


class Counts:
    """Counts of counts-only mode: how often each expert was chosen, and together with each one of the next layer."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        L, E = fingerprint.num_layers, fingerprint.num_experts
        self._dtype = expert_dtype(fingerprint)
        self._activations = np.zeros((L, E), np.int64)
        self._transitions = np.zeros((L - 1, E, E), np.int64)
        self._tokens = 0
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    @staticmethod
    def bytes_needed(fingerprint: Fingerprint) -> int:
        return 8 * fingerprint.num_layers * fingerprint.num_experts**2 + FOLD_ROWS * row_bytes(fingerprint)

    @property
    def nbytes(self) -> int:
        return self._transitions.nbytes + self._activations.nbytes + sum(part.nbytes for part in self._waiting)

    def add(self, expert_ids: np.ndarray) -> None:
        """Add expert ids (n, L, K).

        They are counted in blocks, since counting costs as much for few tokens as for many.
        """
        self._waiting.append(expert_ids.astype(self._dtype))
        self._num_waiting += len(expert_ids)
        if self._num_waiting >= FOLD_ROWS:
            self._fold()

    def arrays(self) -> dict[str, np.ndarray]:
        self._fold()
        tokens = np.array([self._tokens], np.int64)
        return {"activations": self._activations, "transitions": self._transitions, "tokens": tokens}

    def _fold(self) -> None:
        """Count the waiting tokens: ids are widened once and a layer's pairs counted together, in half the time."""
        if not self._waiting:
            return
        narrow = np.ascontiguousarray(np.concatenate(self._waiting).transpose(1, 2, 0))
        experts, size = narrow.astype(np.intp), self._activations.shape[1]  # (L, K, n)
        pairs = np.empty((experts.shape[1], *experts.shape[1:]), np.intp)
        for l, chosen in enumerate(experts):
            self._activations[l] += np.bincount(chosen.ravel(), minlength=size)
            if l > 0:
                np.add((experts[l - 1] * size)[:, None], chosen, out=pairs)
                self._transitions[l - 1] += np.bincount(pairs.ravel(), minlength=size * size).reshape(size, size)
        self._tokens += experts.shape[2]
        self._waiting, self._num_waiting = [], 0
