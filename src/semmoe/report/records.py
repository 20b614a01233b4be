"""The parts of measurements that a report reads: from files that a command's `--json` wrote, and a plan's `expected`.

Nothing in these files is trusted: sizes are bounded, numbers must be finite, and unknown fields are dropped.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _square(rows: list[list[float]]) -> list[list[float]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("figures of rank pairs are not square")
    return rows


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Name = Annotated[str, Field(max_length=200)]
Row = Annotated[list[Amount], Field(max_length=1024)]
Matrix = Annotated[list[Row], Field(max_length=1024), AfterValidator(_square)]
Labels = Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=1_000_000)]


class Record(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Layer(Record):
    """One layer of a replay."""

    layer: int
    lar: Share
    remote_ranks_per_token: Amount
    load_max_over_mean: Amount
    predicted_lar: float | None = None
    load_per_rank: list[Amount] = Field(default=[], max_length=1024)  # (G,) (token, expert) pairs


class Figures(Record):
    """The results of replaying one method."""

    lar: Share
    remote_ranks_per_token: Amount
    load_max_over_mean: Amount
    bytes_ratio: Amount | None = None  # bytes sent, relative to the linear placement
    solve_seconds: Amount | None = None
    layer_us: Amount | None = None
    unknown_token_share: Share | None = None
    bytes_per_rank_pair: Matrix = []  # (G, G), mean of batches and layers
    rows_per_rank_pair: Matrix = []  # (G, G), sum over the whole replay
    layers: list[Layer] = Field(default=[], max_length=1024)

    @model_validator(mode="after")
    def _same_ranks(self) -> "Figures":
        if len({len(layer.load_per_rank) for layer in self.layers}) > 1:
            raise ValueError("layers differ in their number of ranks")
        return self


class Verdict(Record):
    worth_it: bool
    gain: float
    against: Name
    sentence: str = Field(max_length=1000)


class LinksNote(Record):
    name: Name
    kind: Name
    source: str = Field(max_length=2000)


class Expected(Figures):
    """A plan's `expected`: its figures on held-out requests, and those of other methods."""

    holdout: Share
    requests: int
    scheduled_by_answers: int = 0  # requests whose groups were chosen by their answers, for lack of prompts
    batch_tokens: int
    batches: Name
    seed: int
    tokens_per_batch: Amount
    num_batches: int
    others: dict[Name, Figures] = Field(max_length=32)
    links: LinksNote | None = None
    verdict: Verdict | None = None


class Configuration(Record):
    """One configuration that ran: a row of `semmoe demo --json`, or all of `semmoe generate --json`."""

    name: Name
    seconds: Amount
    forward_tokens: int = Field(ge=1)
    sent_bytes: dict[Name, int] = Field(max_length=64)
    all_to_all_bytes_per_rank_pair: Matrix
    lar: Share | None
    remote_ranks_per_token: Amount | None
    load_max_over_mean: Amount
    all_to_all_bytes: Amount
    total_bytes: Amount
    tokens_per_second: Amount
    time_to_first_token: Amount
    identical: bool | None
    identical_text: str = Field(max_length=300)
    plan_hash: str | None = Field(default=None, max_length=64)  # SHA-256 of the plan that it ran on


class DemoFile(Record):
    settings: dict[str, Any]
    prompts: int
    profile_tokens: int
    set_ups: list[Configuration] = Field(min_length=1, max_length=64)
    machine: str = Field(default="", max_length=500)
    versions: dict[Name, Name] = Field(default={}, max_length=32)


class ReplayFile(Record):
    settings: dict[str, Any]
    methods: dict[Name, Figures] = Field(min_length=1, max_length=64)


class Quantiles(Record):
    p25: float
    p50: float
    p75: float


class Statistics(Record):
    f1: Quantiles


class Concentration(Record):
    layer: int
    by_occurrence: Statistics
    by_type: dict[Name, Quantiles]


class Lookback(Record):
    lookback: int
    hit_rate: Share


class AffinityFile(Record):
    trace: dict[str, Any]
    concentration: list[Concentration] = Field(min_length=1, max_length=1024)
    next_layer: list[Lookback] = Field(default=[], max_length=64)
