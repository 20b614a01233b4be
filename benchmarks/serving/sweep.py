"""What a sweep over request rates is asked, and what it found."""

from dataclasses import dataclass, field

from serving.client import Figures

OBJECTIVE = 5  # times the lightest median
LIGHT, AT_ONCE = "light", "all at once"  # names of runs; others are named by `at_rate` and `of_length`
TTFT, E2E = "median_ttft_ms", "median_e2e_ms"


@dataclass(frozen=True, kw_only=True)
class Settings:
    engine: str = ""
    rate: str = "200mbit"
    attentions: tuple[str, ...] = ("dp", "tp")
    redundant_experts: int = 0
    all_reduce: bool = False
    moetuner: bool = False
    dataset: str = ""  # a file; empty: held-out text
    rounds: int = 2
    light_rate: float = 0.5
    light_requests: int = 15
    at_once_requests: int = 100
    fractions: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0)
    seconds: float = 30.0  # of arrivals at each rate
    most_requests: int = 400
    output_tokens: int = 16
    lengths: tuple[int, ...] = (256, 512, 1024)
    length_rate: float = 1.0
    length_requests: int = 30

    def requests(self, rate: float) -> int:
        return min(max(round(rate * self.seconds), 10), self.most_requests)


@dataclass
class Sweep:
    """What vanilla's first visit fixes for all set-ups of an attention."""

    objectives: Figures = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    def fix(self, light: Figures, at_once: Figures, fractions: tuple[float, ...]) -> None:
        self.objectives = {name: OBJECTIVE * light[name] for name in (TTFT, E2E)}
        self.rates = [float(f"{f * at_once['request_throughput']:.2g}") for f in fractions]

    def holds(self, figures: Figures) -> bool:
        return all(figures[name] <= most for name, most in self.objectives.items())


@dataclass(kw_only=True)
class Visit:
    """What one server did."""

    round: int
    name: str
    attention: str
    runs: dict[str, Figures] = field(default_factory=dict)
    goodput: float = 0.0
    activity: Figures = field(default_factory=dict)

    def figure(self, run: str, column: str) -> float | None:
        if run in ("goodput", "activity"):
            return self.goodput if run == "goodput" else self.activity.get(column)
        return self.runs.get(run, {}).get(column)


def at_rate(rate: float) -> str:
    return f"{rate:g} requests/s"


def of_length(length: int) -> str:
    return f"{length} tokens"


def activity(total: dict[str, float]) -> Figures:
    """Nothing where there is no all-to-all."""
    tokens = total.get("routed_tokens", 0)  # each once a layer
    if not tokens:
        return {}
    return {
        "lar": total["pairs.local=true"] / total["pairs"], "remote_rows_per_token": total["remote_rows"] / tokens,
        "all_to_all_bytes_per_token": total["all_to_all_bytes"] / tokens, "routed_tokens": tokens,
        "scheduled_by_plan": total.get("scheduled_requests.by=plan", 0.0),
        "scheduled_by_engine": total.get("scheduled_requests.by=engine", 0.0),
    }  # fmt: skip
