"""Check that all ranks of a group use the same plan and settings before they shuffle tokens and dispatch rows.

Every rank computes slices by itself, without communication. Two ranks with different plans of equal sizes would
exchange rows without an error, each in an order that the other does not expect.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from semmoe import __version__
from semmoe.numeric.digests import digest

DIGEST = 32  # bytes of SHA-256


def check_agreement(group: dist.ProcessGroup | None, decisive: Mapping[str, object], device: Any = "cpu") -> None:
    """Compare across `group` everything that decides where tokens and experts go; every rank of the group must call it.

    decisive: plans and settings that must be equal on all ranks, by their name in messages. Raises ValueError on every
    rank, naming the ranks that differ, unless all agree. Exchanges 32 bytes per name.
    """
    stated = {"the version of semmoe": __version__, **decisive}
    digests = np.stack([digest(value) for value in stated.values()])  # (names, 32)
    own = torch.from_numpy(digests).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    message = disagreement(list(stated), torch.stack(everyone).cpu().numpy())
    if message is not None:
        raise ValueError(message)


def disagreement(names: list[str], digests: np.ndarray) -> str | None:
    """A message on the first name in which ranks differ, or None; digests (ranks, names, 32) uint8."""
    differs = (digests != digests[0]).any(axis=2)  # (ranks, names)
    if not differs.any():
        return None
    first = int(differs.any(axis=0).argmax())
    ranks = ", ".join(map(str, np.flatnonzero(differs[:, first])))
    return (
        f"ranks disagree: {names[first]} of rank {ranks} is not that of rank 0, and rows would reach wrong ranks; "
        "give every node the same semmoe, the same settings and a copy of the same plan"
    )
