"""What is measured: pieces of at most three servers that stay alive, and the published set of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving.configurations import (
    AGAIN,
    AS_IT_COMES,
    COPIES,
    EPLB,
    MOETUNER,
    MORE_COPIES,
    PLAN,
    UNPLANNED,
    VANILLA,
)

MOST_SERVERS = 3
LOW, KNEE, SATURATION, AT_ONCE = "low", "knee", "saturation", "at once"
SHARES = (30, 45, 59)  # % of a forward pass that vanilla spends in the all-to-all when requests come at once
MAIN = SHARES[-1]
START, OVERHEAD = 50.0, 3.5  # seconds of a server's start and warm-up, and of a run beside its load


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All figures of a file are measured with the same."""

    dataset: str = ""  # name of a file of prompts; empty: held-out text
    rounds: int = 7
    seconds: float = 15.0  # of arrivals; all at once take vanilla so long on the slowest links
    fractions: tuple[tuple[str, float], ...] = ((LOW, 0.3), (KNEE, 0.75), (SATURATION, 1.1))  # of vanilla's at once
    length_rate: float = 1.0
    output_tokens: int = 16
    probes: int = 7  # of each link search
    warmup: int = 32  # requests, at once

    def quick(self) -> "Settings":
        return replace(self, rounds=2, seconds=8.0, fractions=((KNEE, 0.75),), probes=2)


@dataclass(frozen=True, kw_only=True)
class Workload:
    arrivals: str  # LOW, KNEE, SATURATION, AT_ONCE, or `N tokens`: prompts of one length at a low rate
    share: int = MAIN  # which link

    def __str__(self) -> str:
        return f"{self.arrivals}, links of {self.share} %"

    def seconds(self, s: Settings) -> float:
        """About how long it takes vanilla; as many requests at once are served sooner on faster links."""
        return s.seconds * ((100 - MAIN) / (100 - self.share) if self.arrivals == AT_ONCE else 1)

    @property
    def length(self) -> int:
        return int(self.arrivals.split()[0]) if self.arrivals.endswith(" tokens") else 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Servers beside vanilla's, and what all of them are asked in every round."""

    name: str
    attention: str
    beside: tuple[str, ...]
    workloads: tuple[Workload, ...]
    ranks: int = 2
    rounds: int = 0  # 0: those of the settings

    @property
    def names(self) -> tuple[str, ...]:
        return (VANILLA, *self.beside)

    def minutes(self, s: Settings) -> float:
        turn = sum(w.seconds(s) + OVERHEAD for w in self.workloads)  # of one configuration in a round
        return len(self.names) * (self.num_rounds(s) * turn + START) / 60

    def num_rounds(self, s: Settings) -> int:
        return min(self.rounds or s.rounds, s.rounds)


def published(engine: str, s: Settings) -> list[Piece]:
    """All pieces of an engine, the most telling first."""
    attentions = ("dp", "tp")
    found = [piece for attention in attentions for piece in _rates(engine, attention, s)]
    found += [_shares(attention) for attention in attentions]
    found += [piece for attention in attentions for piece in _crossed(engine, attention)]
    found += [_lengths(), *(_four_ranks(attention) for attention in attentions)]
    return found


def as_it_comes(engine: str, attention: str) -> tuple[str, ...]:
    """vLLM runs attention-DP on a CPU with an all-to-all only."""
    return () if (engine, attention) == ("vllm", "dp") else (AS_IT_COMES,)


def _rates(engine: str, attention: str, s: Settings) -> Iterator[Piece]:
    """The rates of arrivals: the plan beside its rivals, then the placebos; attention-TP at the middle rate alone."""
    rates = tuple(Workload(arrivals=name) for name, _ in s.fractions if attention == "dp" or name == KNEE)
    names = [COPIES, *as_it_comes(engine, attention), AGAIN, MOETUNER]
    for i, beside in enumerate(_in_twos(names)):
        yield Piece(name=f"{attention}-rates-{i + 1}", attention=attention, beside=beside, workloads=rates)


def _crossed(engine: str, attention: str) -> Iterator[Piece]:
    """The other configurations, requests at once, at the highest share: with `_shares` the full cross."""
    names = [MOETUNER, PLAN, *as_it_comes(engine, attention), EPLB, MORE_COPIES]
    names += [UNPLANNED] if attention == "tp" else []
    loads = (Workload(arrivals=AT_ONCE),)
    for i, beside in enumerate(_in_twos(names)):
        yield Piece(name=f"{attention}-at-once-{i + 1}", attention=attention, beside=beside, workloads=loads)


def _in_twos(names: list[str]) -> list[tuple[str, ...]]:
    """As many as may stay alive beside vanilla."""
    most = MOST_SERVERS - 1
    return [tuple(names[i : i + most]) for i in range(0, len(names), most)]


def _shares(attention: str) -> Piece:
    """Requests at once, by the link; attention-TP on the slowest alone."""
    loads = tuple(Workload(arrivals=AT_ONCE, share=share) for share in SHARES if attention == "dp" or share == MAIN)
    return Piece(name=f"{attention}-shares", attention=attention, beside=(COPIES, AGAIN), workloads=loads)


def _lengths() -> Piece:
    loads = tuple(Workload(arrivals=f"{length} tokens") for length in (256, 512, 1024))
    return Piece(name="tp-lengths", attention="tp", beside=(COPIES, AGAIN), workloads=loads)


def _four_ranks(attention: str) -> Piece:
    """Two cores for four ranks: bytes, messages and shares; times say little."""
    loads = (Workload(arrivals=AT_ONCE),)
    return Piece(
        name=f"{attention}-four-ranks", attention=attention, beside=(COPIES,), workloads=loads, ranks=4, rounds=2
    )
