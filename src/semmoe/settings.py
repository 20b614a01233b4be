"""One frozen dataclass of settings per stage; the command line builds its options and defaults from them."""

from dataclasses import dataclass, field

from semmoe.io.bounds import MOST_LAYERS, MOST_RANKS, Checked, choice, number, option

LOCAL_PAIR = 0.125  # gain from a (token, expert) pair on the token's own rank, in rows to another rank of the node
SEED = (0, (1 << 32) - 1)
TOKENS = (1, 1 << 24)  # least and most tokens of a batch
SHUFFLE_FROM_HELP = "attention-TP: least rows of a pass whose tokens are shuffled; 0: the plan's own number."


@dataclass(frozen=True, kw_only=True)
class PaperSettings(Checked):
    """Weights and lengths of Algorithm 1, none of which the paper gives; docs/method.md says why these."""

    steps: int = number(12, 1, 10_000)  # n_steps: alternations, of which the best by the section 3.3 objective is kept
    swaps_per_expert: int = number(100, 0, 100_000)  # ft_steps, per expert of the layer
    theta: float = number(0.5, 0.001, 0.999)  # weight of load balance against remote activations in the objective
    expert_affinity: float = 0.5  # alpha_e: experts that are used by the same data
    expert_data: float = 1.0  # beta_e: data already in the cluster
    expert_load: float = 0.5  # gamma_e: load already in the cluster
    request_affinity: float = 0.1  # alpha_r: data that uses the same experts
    request_expert: float = 1.0  # beta_r: experts already in the cluster
    lookback: int = number(2, 0, 20)  # layers that the path tables A, A_p look back


@dataclass(frozen=True, kw_only=True)
class CoclusterSettings(Checked):
    """Objective and effort of semmoe's placement. Weights are in units of a row to another rank of the node."""

    activation: float = number(LOCAL_PAIR, 0, 1e6)  # gain from a (token, expert) pair on the token's own rank
    remote_rank: float = number(1.0, 0, 1e6)  # cost of a row sent to another rank
    remote_node: float = number(1.0, 0, 1e6)  # additional cost of a row that leaves the node
    # gain per token of its layer that the move of an expert to another rank must bring, if there is a previous plan
    move_cost: float = number(0.001, 0, 1e6)
    # highest price of a rank's load above the cap, per unit of mean load, in costs of a pair on another rank
    load_price: float = number(2.5, 0, 1e6)
    starts: int = number(6, 1, 1000)  # rough searches of a layer
    kept: int = number(2, 1, 1000)  # searches that continue at each price of load
    rounds: int = number(4, 1, 1000)  # of a search; each recomputes the prices of homes
    steps: int = number(100, 1, 100_000)  # most moves of a round
    patience: int = number(10, 1, 100_000)  # a round ends after this many moves without a better layout
    price_steps: int = number(4, 0, 1000)
    load_limit: float | None = number(  # expert load, max/mean over ranks in a batch, mean over layers; None: no limit
        1.15,
        1,
        MOST_RANKS,
        zero_is_none=True,
        help="semmoe: limit on expert load, max/mean in a batch, at least 1; 0: no limit.",
    )
    copy_choice: str = choice("cover", ("static", "cover"))  # of a pair: one copy per rank, or few ranks per token
    # tokens of a batch over all ranks, to which the limit applies
    batch_tokens: int = number(1024, *TOKENS, help="Tokens of a batch, all ranks together.")
    # seconds of a solve after which no further search of a layer begins; the plan then depends on the machine's speed
    budget: float | None = number(
        None, 0, 7 * 86_400, help="semmoe: return the best plan found in this many seconds; the estimate takes half."
    )


# Alternatives to the default search effort; docs/measurements.md lists their cost and gain.
QUICK = {"starts": 1, "kept": 1, "rounds": 2}
THOROUGH = {"starts": 12, "kept": 4}


@dataclass(frozen=True, kw_only=True)
class PredictorSettings(Checked):
    # layers; None: chosen by the error on held-out requests
    lookback: int | None = number(None, 0, 8)
    max_tokens: int = number(1 << 16, 1, 1 << 24)  # routed tokens to fit on
    # relative increase of the held-out error that is accepted for a shorter look-back
    tolerance: float = number(0.002, 0, 1)


@dataclass(frozen=True, kw_only=True)
class SolveSettings(Checked):
    method: str = "semmoe"
    redundant_experts: int = number(0, 0, 1 << 20, help="Redundant experts over all ranks (linear, eplb, semmoe).")
    seed: int = number(0, *SEED, help="Seed of every random choice.")
    phase: str = choice(
        "both", ("prefill", "decode", "both"), help="semmoe: tokens of the profile that the placement is made for."
    )
    paper: PaperSettings = field(default_factory=PaperSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    cocluster: CoclusterSettings = field(default_factory=CoclusterSettings)


@dataclass(frozen=True, kw_only=True)
class RunningSettings(Checked):
    running: int = number(0, 0, 1 << 20, help="attention-DP: requests at a time on each rank; 0: many.")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(RunningSettings):
    batch_tokens: int = number(1024, *TOKENS, help="Tokens of a batch, all ranks together.")
    batches: str = choice("mixed", ("mixed", "prefill"))  # mixed: decode-like; prefill: consecutive
    # attention-DP: the length of a request is known once more than this many have arrived after it
    unfinished: int = number(32, 0, 1 << 20)
    seed: int = number(0, *SEED, help="Seed of every random choice.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Checked):
    max_new_tokens: int = number(32, 1, 1 << 20, panel="Input", help="Tokens to generate.")
    batch_size: int = number(16, 1, 1 << 16, panel="Input", help="Requests decoded together in a group.")
    dtype: str = choice("float32", ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings(Checked):
    """How ranks of the embedded engine exchange rows around experts."""

    shuffle_from: int = number(0, 0, 1 << 30, help=SHUFFLE_FROM_HELP)
    exchange: str = choice(
        "all-to-all",
        ("all-to-all", "all-reduce"),
        help="all-reduce: expert parallelism without all-to-all, for attention-TP.",
    )


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Checked):
    ep_size: int = number(4, 1, MOST_RANKS, panel="Topology", help="Expert-parallel ranks, each a local process.")
    profile_prompts: int = 144
    generate_prompts: int = 48
    max_prompt_tokens: int = 512
    max_new_tokens: int = 16
    batch_size: int = 16
    seed: int = number(0, *SEED, help="Seed of every random choice.")


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Checked):
    """Which prompts of a dataset are used."""

    limit: int = number(0, 0, 1 << 40, panel="Input", help="Use the first N prompts; 0: all.")
    max_prompt_tokens: int = number(1024, 1, 1 << 24, panel="Input", help="Cut longer prompts to this many tokens.")
    strict: bool = field(
        default=False,
        metadata=option("Fail at the first record without a usable prompt; else it is left out.", panel="Input"),
    )


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(PromptSettings):
    max_new_tokens: int = number(0, 0, 1 << 20, panel="Input", help="Greedy tokens to generate and record.")
    batch_size: int = number(16, 1, 1 << 16, panel="Input", help="Requests run together.")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Checked):
    engine: str = choice("sglang", ("sglang", "vllm"), panel="Input", help="The engine that serves.")
    schedule: str = choice(
        "plan", ("plan", "engine"), help="attention-DP: whether the plan or the engine sends requests to ranks."
    )
    shuffle: str = choice(
        "plan", ("plan", "off"), help="attention-TP: whether the plan shuffles tokens to ranks at every layer."
    )
    shuffle_from: int = number(0, 0, 1 << 30, help=SHUFFLE_FROM_HELP)
    untried: bool = field(
        default=False, metadata=option("Serve a family that no test has run, if it proves itself at start.")
    )
    port: int = number(30000, 1, 65_535, panel="Output", help="Port to listen on.")


@dataclass(frozen=True, kw_only=True)
class RecordSettings(Checked):
    """Settings of `semmoe record start`; the limits apply to each rank."""

    sample: float = number(1.0, 1e-9, 1, help="Share of the requests that is recorded.")
    max_mb: int = number(256, 1, 1 << 20, panel="Limits", help="Memory of each rank for unfinished requests, in MB.")
    max_tokens: int = number(
        10_000_000, 1, 1 << 40, panel="Limits", help="Number of tokens after which each rank stops recording."
    )


@dataclass(frozen=True, kw_only=True)
class SwapSettings(Checked):
    layers_per_pass: int = number(
        0, 0, MOST_LAYERS, help="Layers whose experts move between two forward passes; 0: all at once."
    )
    timeout: float = number(600.0, 1, 86_400, panel="Limits", help="Seconds to wait for the end of the swap.")


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(Checked):
    window: float = number(60.0, 1, 86_400, help="Seconds over which a local activation rate is measured.")
    margin: float = number(0.02, 0, 1, help="Solve if the measured rate is more than this below the expected rate.")
    schedule: float = number(0.0, 0, 1e8, help="Also solve after this many seconds without a solve; 0: only on drift.")
    requests: int = number(500, 70, 1_000_000, help="Requests to record.")
    record_timeout: float = number(600.0, 1, 86_400, help="Stop recording after this many seconds.")
    min_gain: float = number(0.05, 0, 1, help="Least share of its gain by which a new plan must be better.")


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Checked):
    every: float = number(2.0, 0.1, 86_400, help="Seconds between readings.")
    window: float = number(60.0, 0.1, 86_400, help="Seconds over which figures are averaged.")
    margin: float = number(0.05, 0, 1, help="How far the local activation rate may fall below the plan's.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every > self.window:
            raise ValueError(f"--every must be no longer than --window, {self.window:g} s, not {self.every:g}")
