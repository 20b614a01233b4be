"""Rows between ranks that share a GPU: through the host's memory over gloo, since NCCL wants a GPU per rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semmoe.runtime.collectives import Communicator


@dataclass(frozen=True)
class _Landing:
    """Copies what arrived on the host to its places on the device, once the transfers are waited for."""

    places: list[tuple[Tensor, Tensor]]  # on the device and on the host

    def wait(self) -> None:
        for place, arrived in self.places:
            place.copy_(arrived)


class StagedCommunicator(Communicator):
    """A communicator over gloo for tensors of any device. Those on the CPU are sent without a copy."""

    def exchange_rows(self, kind: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Same as `Communicator.exchange_rows`; the rows arrive on the device of `parts`."""
        arrived = super().exchange_rows(kind, [part.cpu() for part in parts])
        return [rows.to(parts[0].device) for rows in arrived]

    def exchange(self, kind: str, receive: Sequence[Tensor | None], send: Sequence[Tensor | None]) -> list[Any]:
        """Same as `Communicator.exchange`; the last work copies what arrived to its device."""
        hosts = [None if t is None or t.is_cpu else torch.empty_like(t, device="cpu") for t in receive]
        arriving = [place if host is None else host for place, host in zip(receive, hosts, strict=True)]
        works = super().exchange(kind, arriving, [None if t is None else t.cpu() for t in send])
        pairs = [(receive[j], host) for j, host in enumerate(hosts) if host is not None and j != self.rank]
        return [*works, _Landing(pairs)] if works else []


def shared_device(rank: int) -> str:
    """Choose the device of a rank where ranks outnumber the GPUs: the CPU without any."""
    count = torch.cuda.device_count()
    if count:
        torch.cuda.set_device(rank % count)
    return "cuda" if count else "cpu"
