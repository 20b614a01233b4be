"""The rows of the table of families and features, which `engines.support` looks up."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class State(str, Enum):
    works = "works, by a test"
    reading = "works by reading, not run"
    refused = "refused"


class Cell(NamedTuple):
    state: State
    note: str  # the test, what was read, or why it is refused and what to do instead


class Family(NamedTuple):
    """How a plan runs on one engine with one family of models."""

    dp: Cell  # experts placed by the plan under attention-DP (hybrid needs both)
    tp: Cell  # experts placed by the plan under attention-TP
    copies: Cell  # redundant experts
    shuffle: Cell  # attention-TP: tokens shuffled by the plan


class Option(NamedTuple):
    """An option of an engine's command line that requests a feature."""

    name: str  # with its dashes
    off: tuple[str, ...] = ()  # values that do not request the feature
    on: tuple[str, ...] = ()  # if not empty, the only values that request the feature


class Feature(NamedTuple):
    name: str
    options: Mapping[str, tuple[Option, ...]]  # by engine
    cells: Mapping[str, Cell]  # by engine, for use with a plan


INSTEAD = "give the engine a checkpoint made by `semmoe apply`, without --plan"
NAMES = {
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 and Moonlight",
    "deepseek_v4": "DeepSeek-V4",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "gpt_oss": "GPT-OSS",
    "glm4_moe": "GLM-4.5",
}


def _works(test: str) -> Cell:
    return Cell(State.works, test)


def _read(what: str) -> Cell:
    return Cell(State.reading, what)


def _no(why: str) -> Cell:
    return Cell(State.refused, why)


def _all(test: str) -> Family:
    return Family(*[_works(test)] * 4)


_SGLANG, _VLLM = "tests/engines/sglang/test_families.py", "tests/engines/vllm/test_families.py"
_WHOLE = "SGLang's {} splits attention over all ranks: solve a plan for attention tp, or {}"
_ONE_RANK = _no("SGLang's OLMoE runs on one rank alone, since it normalises queries over all heads: give --engine vllm")
_UNPLACED = _no(
    "SGLang's GPT-OSS has no expert all-to-all, and its loader places no experts: give --engine vllm, or "
    "serve a checkpoint of `semmoe apply`"
)
_NO_CPU = "DeepSeek-V4 was not run on a plan, since {} and no GPU was at hand: " + INSTEAD
_V4_SGLANG = _no(_NO_CPU.format("SGLang's attention for it needs CUDA streams"))
_V4_VLLM = _no(_NO_CPU.format("vLLM's attention for it needs AMX and Triton on a CPU"))
FAMILIES: dict[str, dict[str, Family]] = {
    "sglang": {
        "qwen3_moe": _all("tests/engines/sglang/test_server.py"),
        "deepseek_v2": _all(_SGLANG),
        "deepseek_v3": _all(_SGLANG),
        "mixtral": Family(_no(_WHOLE.format("Mixtral", "give --engine vllm")), *[_works(_SGLANG)] * 3),
        "glm4_moe": _all(_SGLANG),
        "olmoe": Family(*[_ONE_RANK] * 4),
        "gpt_oss": Family(*[_UNPLACED] * 4),
        "deepseek_v4": Family(*[_V4_SGLANG] * 4),
    },
    "vllm": {
        "qwen3_moe": _all("tests/engines/vllm/test_server.py"),
        "mixtral": _all(_VLLM),
        "glm4_moe": _all(_VLLM),
        "olmoe": _all(_VLLM),
        "gpt_oss": _all(_VLLM),
        "deepseek_v2": _all(_VLLM),
        "deepseek_v3": _all(_VLLM),
        "deepseek_v4": Family(*[_V4_VLLM] * 4),
    },
}


def _both(cell: Cell) -> dict[str, Cell]:
    return {"sglang": cell, "vllm": cell}


def _flags(*names: str) -> tuple[Option, ...]:
    """Options that request a feature with any value."""
    return tuple(Option(name) for name in names)


def _sizes(*names: str) -> tuple[Option, ...]:
    """Options that request a feature unless their value is 1."""
    return tuple(Option(name, off=("0", "1")) for name in names)


_SERVED = {engine: _works(f"tests/engines/{engine}/test_server.py") for engine in FAMILIES}
NEEDS_COPIES = {"dynamic choice of copies"}
NEEDS_SHUFFLE = {"two-batch overlap", "context parallelism"}
NEEDS_SCHEDULE = {"ranks by bootstrap room", "load balancer outside"}
FEATURES = (
    Feature(
        "pipeline parallelism",
        {"sglang": _sizes("--pp-size", "--pipeline-parallel-size"), "vllm": _sizes("--pipeline-parallel-size", "-pp")},
        _both(_no("a plan cannot be served with pipeline parallelism: leave it away")),
    ),
    Feature(
        "EPLB",
        {"sglang": _flags("--enable-eplb"), "vllm": _flags("--enable-eplb")},
        _both(_no("--enable-eplb would move the plan's experts: leave it away")),
    ),
    Feature(
        "elastic expert parallelism",
        {"sglang": (Option("--elastic-ep-backend", off=("none",)),), "vllm": _flags("--enable-elastic-ep")},
        _both(_no("elastic expert parallelism changes the ranks that a plan is for: leave it away")),
    ),
    Feature(
        "two-batch overlap",
        {
            "sglang": _flags("--enable-two-batch-overlap", "--enable-single-batch-overlap"),
            "vllm": (*_flags("--enable-dbo"), *_sizes("--ubatch-size")),
        },
        _both(
            _no(
                "two batches that overlap go around the places where tokens are shuffled: leave it away, or give "
                "--shuffle off"
            )
        ),
    ),
    Feature(
        "megamoe",
        {
            "sglang": (
                Option("--moe-runner-backend", on=("megamoe", "flashinfer_megamoe")),
                Option("--moe-a2a-backend", on=("megamoe", "flashinfer_megamoe")),
            )
        },
        {"sglang": _no("megamoe routes and computes in one kernel, which no plan reaches: choose another back-end")},
    ),
    Feature(
        "dynamic choice of copies",
        {"sglang": (Option("--ep-dispatch-algorithm", off=("static",)),)},
        {"sglang": _no("--ep-dispatch-algorithm other than static ignores the plan's choice of copies: leave it away")},
    ),
    Feature(
        "MoE data parallelism",
        {"sglang": _sizes("--moe-dp-size")},
        {"sglang": _no("--moe-dp-size splits the ranks that share experts, and a plan is for all: leave it away")},
    ),
    Feature(
        "context parallelism",
        {
            "sglang": _sizes("--attn-cp-size", "--dcp-size"),
            "vllm": _sizes("--prefill-context-parallel-size", "--decode-context-parallel-size"),
        },
        _both(
            _no(
                "context parallelism splits prompts over ranks in a way that no plan knows: leave it away, or give "
                "--shuffle off"
            )
        ),
    ),
    Feature(
        "prefill and decode apart",
        {"sglang": (Option("--disaggregation-mode", off=("null",)),), "vllm": _flags("--kv-transfer-config")},
        {engine: _works(f"tests/engines/{engine}/test_disaggregated.py") for engine in FAMILIES},
    ),
    Feature(
        "ranks by bootstrap room",
        {"sglang": (Option("--load-balance-method", on=("follow_bootstrap_room", "auto")),)},
        {
            "sglang": _no(
                "--load-balance-method follow_bootstrap_room, which auto is where prompts alone are computed, binds "
                "requests to other ranks than the plan's: leave it away, or give --schedule engine"
            )
        },
    ),
    Feature(
        "load balancer outside",
        {"vllm": _flags("--data-parallel-external-lb", "--data-parallel-hybrid-lb", "--data-parallel-rank")},
        {
            "vllm": _no(
                "with a load balancer outside of vLLM the plan cannot schedule requests: give --schedule "
                "engine, and put `semmoe picker` with Envoy before it"
            )
        },
    ),
    Feature(
        "speculative decoding",
        {
            "sglang": (Option("--speculative-algorithm", off=("none",)),),
            "vllm": _flags("--speculative-config", "-sc", "--spec-method", "--spec-model"),
        },
        {
            "sglang": _read(
                "speculative decoding on SGLang: passes that verify a draft are shuffled outside of CUDA "
                "graphs, a draft model is not counted, nothing is recorded; drafts need a GPU's kernels"
            ),
            "vllm": _works("tests/engines/vllm/test_speculation.py"),
        },
    ),
    Feature(
        "weights loaded again",
        {"vllm": _flags("--weight-transfer-config")},
        {
            "sglang": _works("tests/engines/sglang/test_weights.py"),
            "vllm": _no("weights cannot be loaded again into vLLM on a plan: leave --weight-transfer-config away"),
        },
    ),
    Feature("`semmoe record`", {}, _SERVED),
    Feature("prefix cache", {}, _SERVED),
    Feature("preemption", {}, _SERVED),
    Feature(
        "CUDA graphs",
        {},
        _both(
            _read(
                "our part of a decode pass was replayed from a graph on an H100, without an engine; passes over "
                "prompts that a plan shuffles are not captured"
            )
        ),
    ),
    Feature(
        "fused shared experts",
        {},
        {
            "sglang": _read(
                "SGLang does not fuse them with expert parallelism but on some of AMD's GPUs, where a plan "
                "is refused for another number of experts"
            ),
            "vllm": _works(_VLLM),
        },
    ),
    Feature(
        "images and sound",
        {},
        _both(
            _no(
                "placeholders of images share one token id, by which nothing can be predicted, and no such family "
                f"is known: {INSTEAD}"
            )
        ),
    ),
    Feature(
        "LoRA",
        {"sglang": _flags("--enable-lora", "--lora-paths"), "vllm": _flags("--enable-lora")},
        _both(_read("LoRA with a plan: adapters of attention alone; those of experts are not known to fit")),
    ),
)
_BY_EXPERT = _read("quantised weights with a plan: each expert's tensors go to the plan's slots; no CPU computes them")
_LOADED = _works("tests/engines/vllm/test_quantised.py")
QUANTISATION = {
    method: {"sglang": _BY_EXPERT, "vllm": _LOADED} for method in ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4")
} | {"modelopt": _both(_BY_EXPERT)}
