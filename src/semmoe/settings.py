"""One frozen dataclass of settings a stage; the command line takes its defaults from here."""

from dataclasses import dataclass, field

from semmoe.bounds import MOST_RANKS, check_numbers, choice, number, switch

GRANULARITIES = ("layer", "batch")  # how often attention-TP decides anew where tokens go
SEED = (0, (1 << 32) - 1)
TOKENS = (1, 1 << 24)  # of a batch


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Weights and lengths of Algorithm 1; the paper gives none of them, see docs/decisions.md for how these came."""

    steps: int = number(
        12, 1, 10_000, help="paper: alternations of Algorithm 1."
    )  # n_steps: alternations, of which the best by the section 3.3 objective is kept
    swaps_per_expert: int = number(100, 0, 100_000)  # ft_steps, per expert of the layer
    # weight of load balance against remote activations in the objective
    theta: float = number(0.5, 0.001, 0.999, help="paper: weight of balance in the objective.")
    expert_affinity: float = 0.5  # alpha_e: experts that are used by the same data
    expert_data: float = 1.0  # beta_e: data already in the cluster
    expert_load: float = 0.5  # gamma_e: load already in the cluster
    request_affinity: float = 0.1  # alpha_r: data that uses the same experts
    request_expert: float = 1.0  # beta_r: experts already in the cluster
    # layers that the path tables A, A_p look back
    lookback: int = number(2, 0, 20, help="Layers that predictions look back; by default semmoe chooses.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class MoETunerSettings:
    # seconds for the programs of all layers together
    time_limit: float = number(10.0, 0, 7 * 86_400, help="moetuner: seconds for its integer programs.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class CoclusterSettings:
    """Objective and effort of semmoe's own placement. Weights are in units of one activation that stays on its rank."""

    activation: float = number(1.0, 0, 1e6)  # gain of a (token, expert) pair on the token's own rank
    remote_rank: float = number(  # cost of a row sent to another rank
        1.0,
        0,
        1e6,
        flag="remote_rank_cost",
        help="semmoe: what a row to another rank costs, in pairs of a token and an expert on its own rank.",
    )
    remote_node: float = number(  # further cost of a row that leaves the node
        1.0, 0, 1e6, flag="remote_node_cost", help="semmoe: what a row to another node costs beyond that."
    )
    load_price: float = number(5.0, 0, 1e6)  # the most that is paid for a rank's load above the cap, per mean load
    starts: int = number(4, 1, 1000)
    kicks: int = number(20, 0, 100_000)
    sweeps: int = number(12, 1, 1000)
    price_steps: int = number(4, 0, 1000)
    load_limit: float | None = number(  # expert load, max/mean over ranks in a batch, mean over layers; None: no limit
        1.15,
        1,
        MOST_RANKS,
        zero_is_none=True,
        help="semmoe: most expert load, max/mean in a batch, from 1; 0: no limit.",
    )
    # all ranks together, for which the limit is meant
    batch_tokens: int = number(1024, *TOKENS, help="Tokens of a batch, all ranks together.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class PredictorSettings:
    # layers; None: chosen on held-out requests
    lookback: int | None = number(None, 0, 8, help="Layers that predictions look back; by default semmoe chooses.")
    max_tokens: int = number(1 << 16, 1, 1 << 24)  # routed tokens to fit on
    tolerance: float = number(0.002, 0, 1)  # share of the best held-out error that a shorter look-back may lose

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class SolveSettings:
    method: str = "semmoe"
    redundant_experts: int = number(  # physical experts beyond the logical ones, over all ranks
        0, 0, 1 << 20, help="Redundant experts in all (linear, eplb, grace, semmoe)."
    )
    seed: int = number(0, *SEED, help="Seed of every random choice.")
    paper: PaperSettings = field(default_factory=PaperSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    cocluster: CoclusterSettings = field(default_factory=CoclusterSettings)
    moetuner: MoETunerSettings = field(default_factory=MoETunerSettings)

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    batch_tokens: int = number(1024, *TOKENS, help="Tokens of a batch, all ranks together.")
    batches: str = choice("mixed", ("mixed", "prefill"), help="mixed: decode-like; prefill: consecutive.")
    # attention-DP: requests that wait to be assigned together
    window: int = number(1, 1, 1 << 20, help="semmoe, attention-DP: requests that wait to be assigned together.")
    # attention-DP: a length is known once more than so many requests have arrived after it
    unfinished: int = number(32, 0, 1 << 20)
    seed: int = number(0, *SEED, help="Seed of every random choice.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    max_new_tokens: int = number(32, 1, 1 << 20, panel="Input", help="Tokens to generate.")
    # requests decoded together in one attention group
    batch_size: int = number(16, 1, 1 << 16, panel="Input", help="Requests decoded together in a group.")
    # attention-DP: requests assigned together, as if they came one after the other; 0: all that are at hand
    window: int = number(
        0,
        0,
        1 << 20,
        help="attention-DP: requests assigned together as if they came one after the other; 0: all that are at hand.",
    )
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, not {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """How ranks of the embedded engine exchange rows around experts."""

    exchange: str = choice(
        "all-to-all",
        ("all-to-all", "two-level", "all-reduce"),
        help="two-level: a row goes once to each node; all-reduce: expert parallelism without all-to-all.",
    )
    overlap: bool = switch(help="Own tokens' experts run while others' rows are on their way.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    ep_size: int = number(4, 1, MOST_RANKS, panel="Topology", help="Expert-parallel ranks, each a local process.")
    profile_prompts: int = 144
    generate_prompts: int = 48
    max_prompt_tokens: int = 512
    max_new_tokens: int = 16
    batch_size: int = 16
    seed: int = number(0, *SEED, help="Seed of every random choice.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Which prompts of a dataset are used."""

    # the first prompts of a dataset; 0: all
    limit: int = number(0, 0, 1 << 40, panel="Input", help="Use the first N prompts; 0: all.")
    max_prompt_tokens: int = number(1024, 1, 1 << 24, panel="Input", help="Cut longer prompts to this many tokens.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(PromptSettings):
    # greedy tokens to generate and record
    max_new_tokens: int = number(0, 0, 1 << 20, panel="Input", help="Greedy tokens to generate and record.")
    batch_size: int = number(16, 1, 1 << 16, panel="Input", help="Requests run together.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    ep_size: int = number(4, 2, MOST_RANKS, panel="Topology", help="Expert-parallel ranks, each a local process.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    profile_share: float = number(
        0.2, 0.001, 0.999, help="Share of the requests to profile on."
    )  # of the requests; the rest is what plans are scored on

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    schedule: str = choice("plan", ("plan", "engine"), help="attention-DP: who sends requests to ranks.")
    shuffle: str = choice(
        "layer", ("layer", "batch", "off"), help="attention-TP: tokens to ranks anew every layer, or every batch."
    )
    port: int = number(30000, 1, 65_535, panel="Output", help="Port to listen on.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """`semmoe record`; limits are for each rank."""

    sample: float = number(1.0, 1e-9, 1, help="Share of the requests that is recorded.")
    # memory for rows that are not written yet
    max_mb: int = number(256, 1, 1 << 20, panel="Limits", help="Memory of each rank for requests under way, in MB.")
    # recorded in all
    max_tokens: int = number(
        10_000_000, 1, 1 << 40, panel="Limits", help="Tokens after which each rank stops by itself."
    )

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class StopSettings:
    """`semmoe record stop`."""

    timeout: float = number(60.0, 0, 86_400, panel="Limits", help="Seconds to wait for ranks.")

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    every: float = number(2.0, 0.1, 86_400, help="Seconds between looks.")
    window: float = number(60.0, 0.1, 86_400, help="Seconds that figures are taken over.")
    margin: float = number(0.05, 0, 1, help="What the local activation rate may be below the plan's.")

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.every > self.window:
            raise ValueError(f"--every must be no longer than --window, {self.window:g} s, not {self.every:g}")
