"""What is read of measurements: of each file that a command's `--json` wrote, and of a plan's `expected`.

Nothing in them is trusted: sizes are bounded, numbers are finite, and what is not needed is not kept.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Name = Annotated[str, Field(max_length=200)]
Matrix = Annotated[list[Annotated[list[Amount], Field(max_length=1024)]], Field(max_length=1024)]
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
    load_per_rank: list[Amount] = Field(default=[], max_length=1024)  # (G,) pairs


class Figures(Record):
    """What a replay says of one method."""

    lar: Share
    remote_ranks_per_token: Amount
    load_max_over_mean: Amount
    bytes_ratio: Amount | None = None  # of those of linear
    solve_seconds: Amount | None = None
    layer_us: Amount | None = None
    unknown_token_share: Share | None = None
    bytes_per_rank_pair: Matrix = []  # (G, G), of a batch and layer
    rows_per_rank_pair: Matrix = []  # (G, G), of the whole replay
    layers: list[Layer] = Field(default=[], max_length=1024)

    @model_validator(mode="after")
    def _square(self) -> "Figures":
        for pairs in (self.bytes_per_rank_pair, self.rows_per_rank_pair):
            if any(len(row) != len(pairs) for row in pairs):
                raise ValueError("figures of rank pairs are not square")
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
    """A plan's `expected`: its own figures on held-out requests, and others' beside them."""

    holdout: Share
    requests: int
    scheduled_by_answers: int = 0  # of the requests, those whose prompts were their answers
    batch_tokens: int
    batches: Name
    seed: int
    tokens_per_batch: Amount
    num_batches: int
    others: dict[Name, Figures] = Field(max_length=32)
    links: LinksNote | None = None
    verdict: Verdict | None = None


class SetUp(Record):
    """One row of `semmoe demo --json`, or all of `semmoe generate --json`."""

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
    plan_hash: str | None = Field(default=None, max_length=64)  # of the plan that it ran on

    @model_validator(mode="after")
    def _square(self) -> "SetUp":
        pairs = self.all_to_all_bytes_per_rank_pair
        if any(len(row) != len(pairs) for row in pairs):
            raise ValueError("bytes per rank pair are not square")
        return self


class DemoFile(Record):
    settings: dict[str, Any]
    prompts: int
    profile_tokens: int
    set_ups: list[SetUp] = Field(min_length=1, max_length=64)
    machine: str = Field(default="", max_length=500)
    versions: dict[Name, Name] = Field(default={}, max_length=32)


class ReplayFile(Record):
    settings: dict[str, Any]
    methods: dict[Name, Figures] = Field(min_length=1, max_length=64)


class Quantiles(Record):
    p25: float
    p50: float
    p75: float


class Concentration(Record):
    layer: int
    by_occurrence: dict[Name, Quantiles]
    by_type: dict[Name, Quantiles]


class Lookback(Record):
    lookback: int
    hit_rate: Share


class AffinityFile(Record):
    trace: dict[str, Any]
    concentration: list[Concentration] = Field(min_length=1, max_length=1024)
    next_layer: list[Lookback] = Field(default=[], max_length=64)

    @model_validator(mode="after")
    def _has_f1(self) -> "AffinityFile":
        if any("f1" not in layer.by_occurrence for layer in self.concentration):
            raise ValueError("a layer has no f1")
        return self
