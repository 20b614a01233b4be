"""Rows in transit to other ranks, whose number only the sender knows; the columns of a row lie side by side.

Over gloo the number heads the message, so that no counts are exchanged before: a receive may be posted for more bytes
than arrive. Both ends know the most rows that ever went from one to the other at once, and derive from it the room in
the first message; rows that it has no room for follow in a second one, which is rare. Other backends must know sizes
before they start, and exchange counts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.rows import copy_at, flat_bytes, move_bytes, row_bytes

HEAD = 8  # bytes of the number of rows
FIRST_BYTES = 64 << 10  # room for rows before any was sent
Columns = Sequence[tuple[Tensor, Tensor | None]]  # rows, and the indices of those that are sent; None: all of them


def send_rows(comm: Communicator, columns: Columns, counts: Tensor) -> "HeadedParcels | CountedParcels":
    """Start to send rows, ordered by the rank that gets them; counts (size,) int64 for each rank, 0 for this one."""
    widths = [row_bytes(rows) for rows, _ in columns]
    comm.count("dispatch", counts.tolist(), sum(widths))
    return (HeadedParcels if comm.backend == "gloo" else CountedParcels)(comm, columns, counts, widths)


def room(most: np.ndarray, row_bytes: int, least: int) -> np.ndarray:
    """Rows in the first message to ranks that got at most `most` at once before; at least `least` bytes of them."""
    return np.maximum(2 ** np.ceil(np.log2(most)).astype(np.int64), least // max(row_bytes, 1))


class HeadedParcels:
    """One message to every other rank, of HEAD bytes and rows, and a second one where there is no room for all rows.

    Worked example, rows of 10 bytes and room for 4: 3 rows are a message of 38 bytes; 6 rows are 48, then 20.
    """

    def __init__(self, comm: Communicator, columns: Columns, counts: Tensor, widths: list[int]) -> None:
        self._comm, self._widths, self._row = comm, widths, sum(widths)
        self._some = torch.empty(0, dtype=torch.uint8)
        most, self._most = (comm.most_rows.setdefault(w, np.ones(comm.size, np.int64)) for w in ("sent", "received"))
        self._room, sent = room(self._most, self._row, FIRST_BYTES), counts.numpy()
        first = np.minimum(sent, room(most, self._row, FIRST_BYTES))  # rows in the first messages
        np.maximum(most, sent, out=most)
        sizes = np.stack([HEAD + first * self._row, (sent - first) * self._row], axis=1).flatten().tolist()
        parts = self._pack(columns, sent).split(sizes)
        places = HEAD + self._room * self._row
        self._rest: Tensor | None = None
        self._starts, self._arrived = _starts(places), comm.staging("dispatched", [int(places.sum())], self._some)
        self._works = comm.exchange("dispatch", self._arrived.split(places.tolist()), parts[::2])
        self._sending = comm.exchange("dispatch", [None] * comm.size, parts[1::2]) if (first < sent).any() else []
        comm.sent["counts"] += HEAD * (comm.size - 1)

    def _pack(self, columns: Columns, counts: np.ndarray) -> Tensor:
        """The messages to all ranks, one after the other."""
        sizes = HEAD + counts * self._row
        packed, starts = self._comm.staging("to dispatch", [int(sizes.sum())], self._some), _starts(sizes)
        out, to = packed.numpy(), _places(starts + HEAD, counts, self._row)
        out[starts[:, None] + np.arange(HEAD)] = counts[:, None].view(np.uint8)
        for (rows, index), width in zip(columns, self._widths, strict=True):
            chosen = np.arange(len(to)) if index is None else index.numpy()
            copy_at(out, to, flat_bytes(rows), chosen * width, width)
            to += width
        return packed

    def arrive(self) -> list[int]:
        """Wait for the others' rows; returns how many each rank sent (size,)."""
        self._comm.wait("dispatch", self._works)
        heads = self._arrived.numpy()[self._starts[:, None] + np.arange(HEAD)].view(np.int64)[:, 0]
        heads[self._comm.rank] = 0
        np.maximum(self._most, heads, out=self._most)
        self._first, self._last = np.minimum(heads, self._room), np.maximum(heads - self._room, 0)
        if self._sending or self._last.any():
            sizes = self._last * self._row
            self._rest = self._comm.staging("dispatched, the rest", [int(sizes.sum())], self._some)
            works = self._comm.exchange("dispatch", self._rest.split(sizes.tolist()), [None] * self._comm.size)
            self._comm.wait("dispatch", works + self._sending)
        return heads.tolist()

    def unpack(self, outs: Sequence[Tensor]) -> None:
        """Write the rows that arrived, by rank, to the first rows of contiguous tensors, one for each column."""
        before = _starts(self._first + self._last)  # rows of earlier ranks
        self._fill(outs, before, self._first, self._arrived, self._starts + HEAD)
        if self._rest is not None:
            self._fill(outs, before + self._first, self._last, self._rest, _starts(self._last * self._row))

    def _fill(self, outs: Sequence[Tensor], to: np.ndarray, counts: np.ndarray, rows: Tensor, at: np.ndarray) -> None:
        """Copy `counts` rows of each rank, from the places `at`, to the rows of `outs` from `to` on."""
        index, source, arrived = _places(to, counts, 1), _places(at, counts, self._row), rows.numpy()
        for out, width in zip(outs, self._widths, strict=True):
            copy_at(flat_bytes(out), index * width, arrived, source, width)
            source += width


class CountedParcels:
    """The same after an exchange of counts, for tensors on any device."""

    def __init__(self, comm: Communicator, columns: Columns, counts: Tensor, widths: list[int]) -> None:
        self._comm, self._widths, self._received = comm, widths, comm.exchange_counts(counts).tolist()
        sent, row, some = counts.tolist(), sum(widths), columns[0][0].new_empty(0, dtype=torch.uint8)
        packed = comm.staging("to dispatch", (sum(sent), row), some)
        self._arrived, start = comm.staging("dispatched", (sum(self._received), row), some), 0
        for (rows, index), width in zip(columns, widths, strict=True):
            move_bytes(packed, rows, index, to=start)
            start += width
        self._works = comm.exchange("dispatch", self._arrived.split(self._received), packed.split(sent))

    def arrive(self) -> list[int]:
        self._comm.wait("dispatch", self._works)
        return self._received

    def unpack(self, outs: Sequence[Tensor]) -> None:
        for out, start in zip(outs, _starts(np.array(self._widths)).tolist(), strict=True):
            move_bytes(out[: len(self._arrived)], self._arrived, None, start=start)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each part starts of parts that lie one after the other."""
    return np.cumsum(sizes) - sizes


def _places(starts: np.ndarray, counts: np.ndarray, pitch: int) -> np.ndarray:
    """Where each row starts, of `counts` (size,) rows that follow each other from each of `starts` (size,).

    Worked example, starts [8, 100], counts [2, 1], 10 apart: [8, 18, 100].
    """
    return np.repeat(starts - _starts(counts) * pitch, counts) + np.arange(int(counts.sum())) * pitch
