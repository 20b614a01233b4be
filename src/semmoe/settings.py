"""One frozen dataclass of settings a stage; the command line takes its defaults from here."""

from dataclasses import dataclass, field

from semmoe.bounds import MOST_RANKS, check_numbers, number

GRAINS = ("layer", "batch")  # how often attention-TP decides anew where tokens go
SEED = (0, (1 << 32) - 1)
TOKENS = (1, 1 << 24)  # of a batch


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Weights and lengths of Algorithm 1, none of which the paper gives; docs/reading-the-paper.md says why these."""

    steps: int = number(12, 1, 10_000)  # n_steps: alternations, of which the best by the section 3.3 objective is kept
    swaps_per_expert: int = number(100, 0, 100_000)  # ft_steps, per expert of the layer
    theta: float = number(0.5, 0.001, 0.999)  # weight of load balance against remote activations in the objective
    expert_affinity: float = 0.5  # alpha_e: experts that are used by the same data
    expert_data: float = 1.0  # beta_e: data already in the cluster
    expert_load: float = 0.5  # gamma_e: load already in the cluster
    request_affinity: float = 0.1  # alpha_r: data that uses the same experts
    request_expert: float = 1.0  # beta_r: experts already in the cluster
    lookback: int = number(2, 0, 20)  # layers that the path tables A, A_p look back

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class MoETunerSettings:
    time_limit: float = number(10.0, 0, 7 * 86_400)  # seconds for the programs of all layers together

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class CoclusterSettings:
    """Objective and effort of semmoe's own placement. Weights are in units of one activation that stays on its rank."""

    activation: float = number(1.0, 0, 1e6)  # gain of a (token, expert) pair on the token's own rank
    remote_rank: float = number(1.0, 0, 1e6)  # cost of a row sent to another rank
    remote_node: float = number(1.0, 0, 1e6)  # further cost of a row that leaves the node
    load_price: float = number(5.0, 0, 1e6)  # the most that is paid for a rank's load above the cap, per mean load
    starts: int = number(4, 1, 1000)
    kicks: int = number(20, 0, 100_000)
    sweeps: int = number(12, 1, 1000)
    price_steps: int = number(4, 0, 1000)
    load_limit: float | None = 1.15  # expert load, max/mean over ranks in a batch, mean over layers; None: no limit
    batch_tokens: int = number(1024, *TOKENS)  # all ranks together, for which the limit is meant

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.load_limit is not None and not 1 <= self.load_limit <= MOST_RANKS:
            raise ValueError(f"load_limit is max/mean, at least 1, not {self.load_limit}")


@dataclass(frozen=True, kw_only=True)
class PredictorSettings:
    lookback: int | None = number(None, 0, 8)  # layers; None: chosen on held-out requests
    max_tokens: int = number(1 << 16, 1, 1 << 24)  # routed tokens to fit on
    tolerance: float = number(0.002, 0, 1)  # share of the best held-out error that a shorter look-back may lose

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class SolveSettings:
    method: str = "semmoe"
    redundant_experts: int = number(0, 0, 1 << 20)  # physical experts beyond the logical ones, over all ranks
    seed: int = number(0, *SEED)
    paper: PaperSettings = field(default_factory=PaperSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    cocluster: CoclusterSettings = field(default_factory=CoclusterSettings)
    moetuner: MoETunerSettings = field(default_factory=MoETunerSettings)

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    batch_tokens: int = number(1024, *TOKENS)  # all ranks together
    batches: str = "mixed"  # or "prefill"
    window: int = number(1, 1, 1 << 20)  # attention-DP: requests that wait to be assigned together
    # attention-DP: a length is known once more than so many requests have arrived after it
    unfinished: int = number(32, 0, 1 << 20)
    seed: int = number(0, *SEED)

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batches not in ("mixed", "prefill"):
            raise ValueError(f"batches must be mixed or prefill, not {self.batches!r}")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    max_new_tokens: int = number(32, 1, 1 << 20)
    batch_size: int = number(16, 1, 1 << 16)  # requests decoded together in one attention group
    # attention-DP: requests assigned together, as if they came one after the other; 0: all that are at hand
    window: int = number(0, 0, 1 << 20)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, not {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    ep_size: int = number(4, 1, MOST_RANKS)
    profile_prompts: int = 144
    generate_prompts: int = 48
    max_prompt_tokens: int = 512
    max_new_tokens: int = 16
    batch_size: int = 16
    seed: int = number(0, *SEED)

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    limit: int = number(0, 0, 1 << 40)  # the first prompts of a dataset; 0: all
    max_prompt_tokens: int = number(1024, 1, 1 << 24)  # longer prompts are cut
    decode: int = number(0, 0, 1 << 20)  # greedy tokens to generate and record
    batch_size: int = number(16, 1, 1 << 16)  # requests run together

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    ep_size: int = number(4, 2, MOST_RANKS)  # local processes

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    profile_share: float = number(0.2, 0.001, 0.999)  # of the requests; the rest is what plans are scored on

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    port: int = number(30000, 1, 65_535)

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """`semmoe record`; limits are for each rank."""

    sample: float = number(1.0, 1e-9, 1)  # share of the requests
    max_mb: int = number(256, 1, 1 << 20)  # memory for rows that are not written yet
    max_tokens: int = number(10_000_000, 1, 1 << 40)  # recorded in all
    timeout: float = number(60.0, 0, 86_400)  # seconds to wait for ranks that stop

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    every: float = number(2.0, 0.1, 86_400)  # seconds between looks
    window: float = number(60.0, 0.1, 86_400)  # seconds that figures are taken over
    margin: float = number(0.05, 0, 1)  # what the local activation rate may be below the plan's

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.every > self.window:
            raise ValueError(f"--every must be no longer than --window, {self.window:g} s, not {self.every:g}")
