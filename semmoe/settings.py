"""One frozen dataclass of settings a stage; the command line takes its defaults from here."""

from dataclasses import dataclass, field

from semmoe.core import Topology, require

METHODS = (
    "linear", "eplb", "least-loaded", "prefix-affinity", "eldr", "exflow", "moetuner", "grace", "paper", "semmoe",
)  # fmt: skip
REQUEST_METHODS = ("least-loaded", "prefix-affinity", "eldr")  # they send requests to groups and leave experts in order
GRAINS = ("layer", "batch")  # how often attention-TP decides anew where tokens go
REDUNDANT_METHODS = ("linear", "eplb", "grace", "semmoe")  # they know what to do with redundant experts


def obstacle(method: str, topology: Topology, redundant_experts: int) -> str | None:
    """Why `method` cannot be used here, or None."""
    if method in REQUEST_METHODS and topology.dp_size == 1:
        return "it sends requests to attention groups, and attention tp has one: choose --attention dp or hybrid"
    return _lacks_copies(method, redundant_experts)


def _lacks_copies(method: str, redundant_experts: int) -> str | None:
    if redundant_experts == 0 or method in REDUNDANT_METHODS:
        return None
    return f"it has no redundant experts: choose one of {', '.join(REDUNDANT_METHODS)}, or --redundant-experts 0"


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Weights and lengths of Algorithm 1; the paper gives none of them, see docs/decisions.md for how these came."""

    steps: int = 12  # n_steps: alternations, of which the best by the section 3.3 objective is kept
    swaps_per_expert: int = 100  # ft_steps, per expert of the layer
    theta: float = 0.5  # weight of load balance against remote activations in the objective
    expert_affinity: float = 0.5  # alpha_e: experts that are used by the same data
    expert_data: float = 1.0  # beta_e: data already in the cluster
    expert_load: float = 0.5  # gamma_e: load already in the cluster
    request_affinity: float = 0.1  # alpha_r: data that uses the same experts
    request_expert: float = 1.0  # beta_r: experts already in the cluster
    lookback: int = 2  # layers that the path tables A, A_p look back

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        require(0 < self.theta < 1, f"theta must lie between 0 and 1, not {self.theta}")


@dataclass(frozen=True, kw_only=True)
class MoETunerSettings:
    time_limit: float = 10.0  # seconds for the programs of all layers together

    def __post_init__(self) -> None:
        require(0 <= self.time_limit < float("inf"), f"time_limit must be seconds, at least 0, not {self.time_limit}")


@dataclass(frozen=True, kw_only=True)
class CoclusterSettings:
    """Objective and effort of semmoe's own placement. Weights are in units of one activation that stays on its rank."""

    activation: float = 1.0  # gain of a (token, expert) pair on the token's own rank
    remote_rank: float = 1.0  # cost of a row sent to another rank
    remote_node: float = 1.0  # further cost of a row that leaves the node
    load_price: float = 5.0  # cost of a rank's load above the cap, per mean load; most that is paid to meet the limit
    starts: int = 4
    kicks: int = 20
    sweeps: int = 12
    price_steps: int = 4
    load_limit: float | None = 1.15  # expert load, max/mean over ranks in a batch, mean over layers; None: no limit
    batch_tokens: int = 1024  # all ranks together, for which the limit is meant

    def __post_init__(self) -> None:
        for name in ("activation", "remote_rank", "remote_node", "load_price"):
            require(getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name)}")
        for name, least in (("starts", 1), ("sweeps", 1), ("kicks", 0), ("price_steps", 0), ("batch_tokens", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, not {getattr(self, name)}")
        valid = self.load_limit is None or self.load_limit >= 1
        require(valid, f"load_limit is max/mean, at least 1, not {self.load_limit}")


@dataclass(frozen=True, kw_only=True)
class PredictorSettings:
    lookback: int | None = None  # layers; None: chosen on held-out requests
    max_tokens: int = 1 << 16  # routed tokens to fit on
    tolerance: float = 0.002  # a shorter look-back is preferred if its held-out error is within this share of the best

    def __post_init__(self) -> None:
        valid = self.lookback is None or 0 <= self.lookback <= 8
        require(valid, f"lookback must lie between 0 and 8, not {self.lookback}")


@dataclass(frozen=True, kw_only=True)
class SolveSettings:
    method: str = "semmoe"
    redundant_experts: int = 0  # physical experts beyond the logical ones, over all ranks
    seed: int = 0
    paper: PaperSettings = field(default_factory=PaperSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)
    cocluster: CoclusterSettings = field(default_factory=CoclusterSettings)
    moetuner: MoETunerSettings = field(default_factory=MoETunerSettings)

    def __post_init__(self) -> None:
        require(self.method in METHODS, f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        require(self.redundant_experts >= 0, f"redundant_experts must not be negative: {self.redundant_experts}")
        reason = _lacks_copies(self.method, self.redundant_experts)
        require(reason is None, f"method {self.method} does not apply: {reason}")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    batch_tokens: int = 1024  # all ranks together
    batches: str = "mixed"  # or "prefill"
    window: int = 1  # attention-DP: requests that wait to be assigned together
    unfinished: int = 32  # attention-DP: requests that still decode, so that their length is unknown, when one arrives
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.batch_tokens >= 1, f"batch_tokens must be positive, not {self.batch_tokens}")
        require(self.window >= 1, f"window must be at least 1, not {self.window}")
        require(self.unfinished >= 0, f"unfinished must not be negative: {self.unfinished}")
        require(self.batches in ("mixed", "prefill"), f"batches must be mixed or prefill, not {self.batches!r}")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    max_new_tokens: int = 32
    batch_size: int = 16  # requests decoded together in one attention group
    window: int = 0  # attention-DP: requests assigned together, as if they arrived in turn; 0: all that are at hand
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.window >= 0, f"window must not be negative: {self.window}")
        require(self.dtype in ("float32", "bfloat16"), f"dtype must be float32 or bfloat16, not {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    ep_size: int = 4
    profile_prompts: int = 144
    generate_prompts: int = 48
    max_prompt_tokens: int = 512
    max_new_tokens: int = 16
    batch_size: int = 16
    seed: int = 0
