"""What `semmoe estimate` is asked."""

from dataclasses import dataclass

from semmoe.bounds import MOST_RANKS, check_numbers, choice, number, switch
from semmoe.estimate.hardware import GPUS

LOAD, HARDWARE, ROUTING = "Load", "Hardware", "Routing"
MOST_BATCH = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EstimateSettings:
    batch: int = number(128, 1, MOST_BATCH, panel=LOAD, help="Requests that decode at a time, per GPU.")
    input_length: int = number(2000, 1, 1 << 24, panel=LOAD, help="Tokens of a prompt.")
    output_length: int = number(500, 1, 1 << 24, panel=LOAD, help="Tokens of an answer.")
    prompts: int = number(1, 1, MOST_BATCH, panel=LOAD, help="Prompts of a prefill pass, per GPU.")
    overlap: bool = switch(panel=LOAD, help="Two halves of a batch take turns: one computes while the other travels.")
    gpu: str | None = choice(None, tuple(GPUS), panel=HARDWARE, help="The GPU; by default the one in the links' name.")
    weights: str = choice(
        "auto", ("auto", "fp8", "bf16"), panel=HARDWARE, help="How weights are stored; auto: as the model says."
    )
    kv_cache: str = choice("bf16", ("bf16", "fp8"), panel=HARDWARE, help="How the KV cache is stored.")
    memory_share: float = number(
        0.9, 0.01, 1, panel=HARDWARE, help="Share of the GPU's memory for weights and KV cache."
    )
    performance: str = choice(
        "auto",
        ("auto", "aiconfigurator", "roofline"),
        panel=HARDWARE,
        help="Where the time of all but experts and links comes from; auto: aiconfigurator where it can say.",
    )
    # None: not given
    saving: float | None = number(
        None, 0, 1, panel=ROUTING, help="Without --plan: share of vanilla's rows that a plan saves; an assumption."
    )
    load: float = number(
        1.0, 1, MOST_RANKS, panel=ROUTING, help="Without --plan: vanilla's expert load, busiest rank over mean."
    )
    plan_load: float | None = number(
        None, 1, MOST_RANKS, panel=ROUTING, help="With --saving: the plan's expert load; by default vanilla's."
    )
    redundant_experts: int = number(
        0, 0, 1 << 20, panel=ROUTING, help="Redundant experts of EPLB and the plan, over all ranks."
    )

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a value in the KV cache."""
        return {"bf16": 2, "fp8": 1}[self.kv_cache]
