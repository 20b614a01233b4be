"""Typed results, which commands write, and the report and people's own tools read.

A command checks a result against its type before it is written. Nothing in a file is trusted: sizes are
bounded and numbers must be finite.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from semmoe.core import NEVER
from semmoe.costs.payoff import Payoff


def checked(kind: type[BaseModel], result: dict[str, Any]) -> dict[str, Any]:
    """Return `result`. Raises ValueError if a reader of `kind` would refuse it."""
    kind.model_validate(result)
    return result


def _square(rows: list[list[Any]]) -> list[list[Any]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("figures of rank pairs are not square")
    return rows


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Count = Annotated[int, Field(ge=0, le=1 << 60)]
Name = Annotated[str, Field(max_length=200)]
Row = Annotated[list[Amount], Field(max_length=1024)]
Matrix = Annotated[list[Row], Field(max_length=1024), AfterValidator(_square)]
Counts = Annotated[
    list[Annotated[list[Count], Field(max_length=1024)]], Field(max_length=1024), AfterValidator(_square)
]


class Record(BaseModel):
    """A part of a file; a reader drops fields that a record does not name."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Layer(Record):
    """One layer of a replay."""

    layer: int
    lar: Share
    remote_ranks_per_token: Amount
    remote_nodes_per_token: Amount | None = None
    load_max_over_mean: Amount
    load_max_over_median: Amount | None = None
    predicted_lar: float | None = None
    load_per_rank: list[Count] = Field(default=[], max_length=1024)  # (G,) (token, expert) pairs


class Figures(Record):
    """The results of replaying one method, in the order in which files hold them."""

    lar: Share
    remote_ranks_per_token: Amount
    remote_nodes_per_token: Amount | None = None
    load_max_over_mean: Amount  # mean over layers
    load_max_over_median: Amount | None = None
    load_max_layer: Amount | None = None  # max / mean of the layer where it is highest
    token_max_over_mean: Amount | None = None  # routed tokens per attention group, whole replay
    num_batches: int | None = None
    tokens_per_batch: Amount | None = None
    unknown_token_share: Share | None = None  # of the looked-up tokens, those for which only the prior was known
    unknown_token_lar: Share | None = None  # None unless tokens are shuffled by tables
    predicted_lar: float | None = None
    rows_per_rank_pair: Counts = []  # (G, G), sum over the whole replay
    # by kind of all-to-all: rows per token "inside_node" and "between_nodes"
    rows_by_kind: dict[Name, dict[Name, Amount]] = Field(default={}, max_length=8)
    layers: list[Layer] = Field(default=[], max_length=1024)
    bytes_ratio: Amount | None = None  # bytes sent, relative to the linear placement
    solve_seconds: Amount | None = None
    layer_us: Amount | None = None
    bytes_per_rank_pair: Matrix = []  # (G, G), mean of batches and layers

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
    all_to_all: Name = "per-rank"  # the rows that it charges: rowcosts.KINDS


class Judged(Record):
    """A verdict and the links that it is for."""

    links: LinksNote | None = None
    verdict: Verdict | None = None


class Elsewhere(Record):
    """The gain (batches, bandwidths) in batches of `batch_tokens` tokens, on links of `bandwidths` times the speed."""

    bandwidths: list[Amount] = Field(min_length=1, max_length=32)
    batch_tokens: list[Amount] = Field(min_length=1, max_length=32)
    gains: list[Annotated[list[float], Field(max_length=32)]] = Field(max_length=32)

    @model_validator(mode="after")
    def _whole(self) -> "Elsewhere":
        if [len(self.bandwidths)] * len(self.batch_tokens) != list(map(len, self.gains)):
            raise ValueError("gains are not (batches, bandwidths)")
        return self


class Expected(Figures, Judged):
    """A plan's `expected`: its figures on held-out requests, and those of other methods."""

    holdout: Share
    requests: int
    scheduled_by_answers: int = 0  # requests whose groups were chosen by their answers, for lack of prompts
    running: int = 0  # requests at a time on each rank; 0: many
    batch_tokens: int
    batches: Name
    seed: int
    tokens_per_batch: Amount
    num_batches: int
    others: dict[Name, Figures] = Field(max_length=32)
    elsewhere: Elsewhere | None = None
    decode: Judged | None = None  # of decoding, where it uses another all-to-all
    shuffle_from: int | None = Field(default=None, ge=1, le=NEVER)  # where tokens are shuffled by tables


class GenerateFile(Record):
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
    set_ups: list[GenerateFile] = Field(min_length=1, max_length=64)
    payoffs: list[Payoff] = Field(default=[], max_length=1024)  # none on one rank
    machine: str = Field(default="", max_length=500)
    versions: dict[Name, Name] = Field(default={}, max_length=32)


class ReplayFile(Record):
    settings: dict[str, Any]
    methods: dict[Name, Figures] = Field(min_length=1, max_length=64)
