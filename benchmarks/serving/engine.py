"""What the benchmarks ask of an engine; the rest of them is the same for all."""

import argparse
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from semmoe.topology import Topology
from serving.network import Network

if TYPE_CHECKING:
    import aiohttp

RANKS = 2  # where each is a node, or a process beside the benchmark's own


class ServerError(Exception):
    """Why a server did not start, or ended; one line, and then the end of its log."""


@dataclass(frozen=True, kw_only=True)
class SetUp:
    name: str
    attention: str
    plan: Path | None = None  # none: vanilla
    schedule: str = "plan"
    shuffle: str = "plan"
    ranks: int = RANKS
    all_to_all: bool = True  # False: as the engine sums experts by itself, without a plan

    @property
    def topology(self) -> Topology:
        return Topology.for_attention(self.attention, self.ranks)


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str]  # what to add


class Engine(ABC):
    NAME = ""  # of the package
    TITLE = ""
    NOTE = ""  # what differs from the engine as it comes, in every configuration
    RANK: str | tuple[str, ...] = ""  # how the titles of the ranks' processes begin
    OPTIONS: ClassVar[dict[str, Any]] = {}  # of every server, vanilla or not
    BY_ATTENTION: ClassVar[dict[str, dict[str, Any]]] = {}  # more of them, of one attention's servers
    UNCACHED: ClassVar[dict[str, Any]] = {}  # the option that keeps no prefixes
    GRACE = 0.0  # seconds that processes have to end by themselves
    NATIVE = False  # whether the soak knows another interface than OpenAI's
    WRONG_RANK: ClassVar[dict[str, Any]] = {}  # in a request's body
    WRONG_RANK_HEADERS: ClassVar[dict[str, str]] = {}

    def __str__(self) -> str:
        return f"{self.TITLE} {version(self.NAME)}"

    @abstractmethod
    def serve(self, up: SetUp, folder: Path, port: int, options: dict[str, Any]) -> Command:
        """The engine's own command for the set-up, as `semmoe serve` has it; counters go to `folder`."""

    @abstractmethod
    def on_node(self, up: SetUp, network: Network, node: int, port: int) -> Command:
        """What `serve` needs besides where each node has ranks of the set-up; port: where nodes meet."""

    @abstractmethod
    async def busy(self, session: "aiohttp.ClientSession") -> list[int]:
        """Requests on each data-parallel rank, that run or wait."""


def engine(name: str) -> Engine:
    """In the engine's own environment only."""
    if name == "sglang":
        from serving.sglang import Sglang

        return Sglang()
    from serving.vllm import Vllm

    return Vllm()


def add_engine(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=required)


def python(*words: str) -> list[str]:
    return [sys.executable, *words]
