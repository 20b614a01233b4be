"""What the stand-in has sent to other ranks, by kind of row, for whoever compares: one file of each process.

With DEEP_EP_CPU_COUNTS=FOLDER every process keeps FOLDER/deep-ep-PID.npy, (3,) int64 in the order of KINDS, always
up to date. Rows to a rank itself are copied by DeepEP, not sent, and not counted.
"""

import os
from pathlib import Path

import numpy as np

FOLDER = "DEEP_EP_CPU_COUNTS"
NODE_SIZE = "DEEP_EP_CPU_NODE_SIZE"  # ranks of a node, which stand for those that NVLink joins; unset: all
PAIRS, RANKS, NODES = KINDS = ("pairs", "ranks", "nodes")


class Counts:
    """Rows sent: for a (token, expert) elsewhere, a (token, rank) elsewhere, a (token, node) elsewhere."""

    def __init__(self) -> None:
        self._values: np.ndarray = np.zeros(len(KINDS), np.int64)
        if folder := os.environ.get(FOLDER):
            path = Path(folder) / f"deep-ep-{os.getpid()}.npy"
            self._values = np.lib.format.open_memmap(path, "w+", np.int64, (len(KINDS),))

    def add(self, kind: str, rows: int) -> None:
        self._values[KINDS.index(kind)] += rows

    def __getitem__(self, kind: str) -> int:
        return int(self._values[KINDS.index(kind)])


def totals(folder: Path) -> dict[str, int]:
    """Of all processes that counted in a folder."""
    found = [np.load(path) for path in sorted(folder.glob("deep-ep-*.npy"))]
    return dict(zip(KINDS, map(int, np.sum(found, axis=0)), strict=True)) if found else dict.fromkeys(KINDS, 0)


def node_size(ranks: int) -> int:
    """Ranks of a node. Raises ValueError if they do not divide the group."""
    size = int(os.environ.get(NODE_SIZE) or ranks)
    if size < 1 or ranks % size:
        raise ValueError(f"{NODE_SIZE}={size} does not divide {ranks} ranks")
    return size
