"""The rows of the table of families and features, which `engines.support` looks up."""

from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import NamedTuple


class State(str, Enum):
    works = "works, by a test"
    reading = "works by reading, not run"
    refused = "refused"


class Cell(NamedTuple):
    state: State
    note: str  # the test, what was read, or why it is refused and what to do instead


class Option(NamedTuple):
    """An option of an engine's command line that requests a feature."""

    name: str  # with its dashes
    off: tuple[str, ...] = ()  # values that do not request the feature
    on: tuple[str, ...] = ()  # if not empty, the only values that request the feature


class Feature(NamedTuple):
    name: str
    options: Mapping[str, tuple[Option, ...]]  # by engine
    cells: Mapping[str, Cell]  # by engine, for use with a plan
    needs: str  # the attribute of `support.Use` without which the feature does no harm; "" if there is none


def _row(
    state: State, name: str, note: str, sglang: str | None = "", vllm: str | None = "", needs: str = ""
) -> Feature:
    """A feature, with the options of each engine that request it; None: this row is not about the engine.

    `--a` requests it with any value, `--a=x,y` with these values alone, `--a!=x,y` with all values but these.
    """
    words = {engine: text for engine, text in (("sglang", sglang), ("vllm", vllm)) if text is not None}
    cells = {engine: Cell(state, note.replace("ENGINE", engine)) for engine in words}
    return Feature(name, {engine: tuple(map(_option, text.split())) for engine, text in words.items()}, cells, needs)


def _option(text: str) -> Option:
    name, _, values = text.partition("=")
    listed = tuple(values.split(",")) if values else ()
    return Option(name[:-1], off=listed) if name.endswith("!") else Option(name, on=listed)


_works, _read, _no = (partial(Cell, state) for state in State)
_works_row, _read_row, _no_row = (partial(_row, state) for state in State)
INSTEAD = "give the engine a checkpoint made by `semmoe apply`, without --plan"
# How a plan runs on one engine with one family of models: experts placed by the plan under attention-DP and under
# attention-TP (hybrid needs both), redundant experts, and tokens shuffled by the plan. An unknown family has one cell.
PARTS = {
    "any": "any plan",
    "dp": "attention-DP",
    "tp": "attention-TP",
    "copies": "copies",
    "shuffle": "tokens shuffled",
}
Family = Mapping[str, Cell]  # by part


def _all(cell: Cell) -> Family:
    return dict.fromkeys(("dp", "tp", "copies", "shuffle"), cell)


_SGLANG, _VLLM = (_all(_works(f"tests/engines/{engine}/test_families.py")) for engine in ("sglang", "vllm"))
_NO_CPU = "DeepSeek-V4 was not run on a plan, since {} and no GPU was available: " + INSTEAD
_WHOLE = "SGLang's Mixtral splits attention over all ranks: solve a plan for attention tp, or give --engine vllm"
_ONE_RANK = "SGLang's OLMoE runs on one rank alone, since it normalises queries over all heads: give --engine vllm"
_UNPLACED = (
    "SGLang's GPT-OSS has no expert all-to-all, and its loader places no experts: give --engine vllm, or "
    "serve a checkpoint of `semmoe apply`"
)
NAMES = {
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 and Moonlight",
    "mixtral": "Mixtral",
    "glm4_moe": "GLM-4.5",
    "olmoe": "OLMoE",
    "gpt_oss": "GPT-OSS",
    "deepseek_v4": "DeepSeek-V4",
}
FAMILIES: dict[str, dict[str, Family]] = {
    "sglang": dict.fromkeys(NAMES, _SGLANG)
    | {
        "qwen3_moe": _all(_works("tests/engines/sglang/test_server.py")),
        "mixtral": {**_SGLANG, "dp": _no(_WHOLE)},
        "olmoe": _all(_no(_ONE_RANK)),
        "gpt_oss": _all(_no(_UNPLACED)),
        "deepseek_v4": _all(_no(_NO_CPU.format("SGLang's attention for it needs CUDA streams"))),
    },
    "vllm": dict.fromkeys(NAMES, _VLLM)
    | {
        "qwen3_moe": _all(_works("tests/engines/vllm/test_server.py")),
        "deepseek_v4": _all(_no(_NO_CPU.format("vLLM's attention for it needs AMX and Triton on a CPU"))),
    },
}
_SERVED = "tests/engines/ENGINE/test_server.py"
FEATURES = (
    _no_row(
        "pipeline parallelism",
        "a plan cannot be served with pipeline parallelism: omit it",
        "--pp-size!=0,1 --pipeline-parallel-size!=0,1",
        "--pipeline-parallel-size!=0,1 -pp!=0,1",
    ),
    _no_row("EPLB", "--enable-eplb would move the plan's experts: omit it", "--enable-eplb", "--enable-eplb"),
    _no_row(
        "elastic expert parallelism",
        "elastic expert parallelism changes the ranks that a plan is for: omit it",
        "--elastic-ep-backend!=none",
        "--enable-elastic-ep",
    ),
    _no_row(
        "two-batch overlap",
        "two overlapping batches bypass the places where tokens are shuffled: omit it, or give --shuffle off",
        "--enable-two-batch-overlap --enable-single-batch-overlap",
        "--enable-dbo --ubatch-size!=0,1",
        needs="shuffles",
    ),
    _no_row(
        "megamoe",
        "megamoe routes and computes in one kernel, which no plan reaches: choose another back-end",
        "--moe-runner-backend=megamoe,flashinfer_megamoe --moe-a2a-backend=megamoe,flashinfer_megamoe",
        vllm=None,
    ),
    _no_row(
        "dynamic choice of copies",
        "--ep-dispatch-algorithm other than static ignores the plan's choice of copies: omit it",
        "--ep-dispatch-algorithm!=static",
        vllm=None,
        needs="redundant",
    ),
    _no_row(
        "MoE data parallelism",
        "--moe-dp-size splits the ranks that share experts, and a plan is for all: omit it",
        "--moe-dp-size!=0,1",
        vllm=None,
    ),
    _no_row(
        "context parallelism",
        "context parallelism splits prompts in a way that no plan knows: omit it, or give --shuffle off",
        "--attn-cp-size!=0,1 --dcp-size!=0,1",
        "--prefill-context-parallel-size!=0,1 --decode-context-parallel-size!=0,1",
        needs="shuffles",
    ),
    _works_row(
        "prefill and decode apart",
        "tests/engines/ENGINE/test_disaggregated.py",
        "--disaggregation-mode!=null",
        "--kv-transfer-config",
    ),
    _no_row(
        "ranks by bootstrap room",
        "--load-balance-method follow_bootstrap_room, which auto is where prompts alone are computed, binds requests "
        "to other ranks than the plan's: omit it, or give --schedule engine",
        "--load-balance-method=follow_bootstrap_room,auto",
        vllm=None,
        needs="schedules",
    ),
    _no_row(
        "load balancer outside",
        "with a load balancer outside of vLLM the plan cannot schedule requests: give --schedule engine, and put "
        "`semmoe picker` with Envoy before it",
        None,
        "--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-rank",
        needs="schedules",
    ),
    _read_row(
        "speculative decoding",
        "speculative decoding on SGLang: passes that verify a draft are shuffled outside of CUDA graphs, a draft model "
        "is not counted, nothing is recorded; drafts need a GPU's kernels",
        "--speculative-algorithm!=none",
        vllm=None,
    ),
    _works_row(
        "speculative decoding",
        "tests/engines/vllm/test_speculation.py",
        None,
        "--speculative-config -sc --spec-method --spec-model",
    ),
    _works_row("weights loaded again", "tests/engines/sglang/test_weights.py", vllm=None),
    _no_row(
        "weights loaded again",
        "weights cannot be loaded again into vLLM on a plan: omit --weight-transfer-config",
        None,
        "--weight-transfer-config",
    ),
    _works_row("`semmoe record`", _SERVED),
    _works_row("prefix cache", _SERVED),
    _works_row("preemption", _SERVED),
    _read_row(
        "CUDA graphs",
        "our part of a decode pass was replayed from a graph on an H100, without an engine; passes over prompts that a "
        "plan shuffles are not captured",
    ),
    _read_row(
        "fused shared experts",
        "SGLang does not fuse them with expert parallelism but on some of AMD's GPUs, where a plan is refused for "
        "another number of experts",
        vllm=None,
    ),
    _works_row("fused shared experts", "tests/engines/vllm/test_families.py", sglang=None),
    _no_row(
        "images and sound",
        "placeholders of images share one token id, by which nothing can be predicted, and no such family is known: "
        + INSTEAD,
    ),
    _read_row(
        "LoRA",
        "LoRA with a plan: adapters of attention alone; those of experts are not known to fit",
        "--enable-lora --lora-paths",
        "--enable-lora",
    ),
)
_BY_EXPERT = _read("quantised weights with a plan: each expert's tensors go to the plan's slots; no CPU computes them")
_LOADED = _works("tests/engines/vllm/test_quantised.py")
QUANTISATION = {
    method: {"sglang": _BY_EXPERT, "vllm": _LOADED} for method in ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4")
} | {"modelopt": {"sglang": _BY_EXPERT, "vllm": _BY_EXPERT}}
