"""Typed results: what commands and benchmarks write, and what the report, the lab and people's own tools read.

A command checks what it writes against these types, and a reader reads by them. Nothing in a file is trusted: sizes are
bounded and numbers must be finite. Benchmarks write text for people, each part of it ended by a line of JSON.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from semmoe.core import NEVER

LIGHT, AT_ONCE = "light", "all at once"  # names of runs; the others are "R requests/s" and "N tokens"
PAIRED = {"output_throughput": "request_throughput"}  # in proportion: every answer has as many tokens
Values = dict[str, float]


class Objectives(BaseModel):
    """What vanilla's first visit fixed for all set-ups of one attention."""

    model_config = ConfigDict(extra="forbid")
    objectives: Values  # the most that each may be, in ms
    rates: list[float]  # requests/s that were tried


class Visit(BaseModel):
    """What one server did in one round. runs: by name, in requests/s, tokens/s and ms."""

    model_config = ConfigDict(extra="forbid")
    round: int
    name: str
    attention: str
    runs: dict[str, Values]
    goodput: float  # the highest rate at which the objectives held
    activity: Values  # the server's own counters; none without all-to-all


class Claim(BaseModel):
    """A figure over vanilla's of the same rounds, and whether it can be told from a placebo's."""

    model_config = ConfigDict(extra="forbid")
    name: str
    run: str
    column: str
    ratio: float
    low: float
    high: float
    placebo: list[float]  # what the placebos span; nothing without any
    rounds: int
    says: str  # the ratio and its interval, or why nothing is claimed


class ServingSweep(BaseModel):
    """What `benchmarks/bench_served.py report` printed, or the benchmark before it.

    Set-ups are named "ATTENTION, ...", vanilla "ATTENTION, vanilla".
    """

    model_config = ConfigDict(extra="forbid")
    settings: dict[str, Any]
    sweeps: dict[str, Objectives]  # by attention
    visits: list[Visit]
    claims: list[Claim] = []  # none in files of the benchmark before

    def figure(self, name: str, run: str, column: str) -> float | None:
        """Median over rounds, None without any; of paired ones vanilla's by the median ratio, since days differ."""
        vanilla = f"{name.split(',')[0]}, vanilla"
        if name != vanilla and (claim := self.claim(name, run, PAIRED.get(column, column))):
            return (base := self.figure(vanilla, run, column)) and claim.ratio * base
        found = [v.runs[run][column] for v in self.visits if v.name == name and column in v.runs.get(run, {})]
        return median(found) if found else None

    def claim(self, name: str, run: str, column: str) -> Claim | None:
        """None where nothing was measured in pairs."""
        return next((c for c in self.claims if (c.name, c.run, c.column) == (name, run, column)), None)

    def runs(self, name: str) -> list[str]:
        """Names of a set-up's runs, in the order in which they were made."""
        return list(dict.fromkeys(run for v in self.visits if v.name == name for run in v.runs))

    def names(self, attention: str) -> list[str]:
        return list(dict.fromkeys(v.name for v in self.visits if v.attention == attention))


@dataclass(frozen=True)
class Part:
    """One benchmark's run in a file."""

    path: Path
    command: str  # that made it; empty where the file does not say
    described: str  # the line in which it says what it ran on
    data: dict[str, Any]


def parts(path: Path) -> Iterator[Part]:
    """All of a file. A line that is no JSON object is text."""
    text: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = _object(line)
        if data is None:
            text.append(line)
            continue
        lines = [line for line in text if line.strip()]
        command = lines[0][2:] if lines and lines[0].startswith("$ ") else ""
        described = next((line for line in lines if not line.startswith(("$ ", "("))), "")
        yield Part(path, command, described, data)
        text = []


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"'):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def serving_sweep(part: Part) -> ServingSweep | None:
    """None if the part is of another benchmark. Raises ValueError for one that is damaged."""
    if not {"settings", "sweeps", "visits"} <= part.data.keys():
        return None
    try:
        return ServingSweep.model_validate(part.data)
    except ValidationError as error:
        raise ValueError(f"{part.path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None


def checked(kind: type[BaseModel], result: dict[str, Any]) -> dict[str, Any]:
    """`result` as it is, once it is known to be what a reader of `kind` takes."""
    kind.model_validate(result)
    return result


def _square(rows: list[list[float]]) -> list[list[float]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("figures of rank pairs are not square")
    return rows


Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Name = Annotated[str, Field(max_length=200)]
Row = Annotated[list[Amount], Field(max_length=1024)]
Matrix = Annotated[list[Row], Field(max_length=1024), AfterValidator(_square)]


class Record(BaseModel):
    """What a file must hold; fields that are not named here are dropped when it is read."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Layer(Record):
    """One layer of a replay."""

    layer: int
    lar: Share
    remote_ranks_per_token: Amount
    remote_nodes_per_token: Amount | None = None
    load_max_over_mean: Amount
    predicted_lar: float | None = None
    load_per_rank: list[Amount] = Field(default=[], max_length=1024)  # (G,) (token, expert) pairs


class Figures(Record):
    """The results of replaying one method."""

    lar: Share
    remote_ranks_per_token: Amount
    remote_nodes_per_token: Amount | None = None
    load_max_over_mean: Amount
    bytes_ratio: Amount | None = None  # bytes sent, relative to the linear placement
    solve_seconds: Amount | None = None
    layer_us: Amount | None = None
    unknown_token_share: Share | None = None
    bytes_per_rank_pair: Matrix = []  # (G, G), mean of batches and layers
    rows_per_rank_pair: Matrix = []  # (G, G), sum over the whole replay
    # by kind of all-to-all: rows per token "inside_node" and "between_nodes"
    rows_by_kind: dict[Name, dict[Name, Amount]] = Field(default={}, max_length=8)
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
    all_to_all: Name = "per-rank"  # the rows that it charges: rowcosts.KINDS


class Judged(Record):
    """A verdict and the links that it is for."""

    links: LinksNote | None = None
    verdict: Verdict | None = None


class Elsewhere(Record):
    """The gain (batches, bandwidths) on links of so many times the bandwidth, and in batches of so many tokens."""

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


class AffinityFile(Record):
    trace: dict[str, Any]
    concentration: list[Concentration] = Field(min_length=1, max_length=1024)
