"""Generate on a plan with ranks that share GPUs, and compare every token with plain transformers.

    python benchmarks/prove_tokens.py PLAN [--model tiny] [--prompts 12] [--new-tokens 16]

The embedded engine takes NCCL and a GPU per rank, or the CPU. Here ranks that outnumber the GPUs share them, and their
rows go through the host's memory over gloo, so that times are not meaningful. Without a GPU the same path runs on the
CPU. Every pass of attention-TP is shuffled. Prints one JSON line; exit code 1 if a token differs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semmoe.cli.demo import demo_prompts, generate_compared
from semmoe.cli.options import model_path
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.io import console
from semmoe.plan import load_plan
from semmoe.runtime.collectives import Communicator, world
from semmoe.settings import DemoSettings, GenerateSettings


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


def run_rank(rank: int, size: int, job: Any, report: Any) -> list[gen.GenerateResult]:
    """Run a rank as `semmoe.engines.transformers.generate` does; over gloo it is staged, and may share a GPU."""
    with world(rank, size, Path(job.scratch)) as (comm, device):
        if comm.backend == "gloo":
            comm, device = StagedCommunicator(comm.group, rank, size), shared_device(rank)
        return [gen._run_set_up(comm, job, one, device, report) for one in job.set_ups]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", default="tiny", type=model_path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=16)
    a = parser.parse_args()
    asked = DemoSettings(generate_prompts=a.prompts, max_prompt_tokens=128)
    prompts = demo_prompts(asked, load_tokenizer(a.model))[1]
    configuration = gen.Configuration(name=str(a.plan), plan=replace(load_plan(a.plan), shuffle_from=1))
    settings = GenerateSettings(max_new_tokens=a.new_tokens)
    gen._RANK = run_rank
    with console.bars() as bars:
        [(_, figures)] = generate_compared(a.model, prompts, [configuration], settings, bars, verify=True)
    print(json.dumps({"GPUs": torch.cuda.device_count(), "prompts": len(prompts), **figures}))
    return 0 if figures["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
