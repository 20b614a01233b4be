"""What vLLM 0.32.0 lacks on a CPU, and nothing else: it plays no part where there is a GPU.

With these patches its real scheduler, models and collectives run expert parallelism in plain processes. They are gaps
of the CPU backend that vanilla vLLM has too; none changes a result.
"""

import logging
import sys
from typing import Any

import torch

from semmoe.engines.hooks import Hook
from semmoe.engines.vllm.registry import around
from semmoe_vllm_cpu.deepep import select_experts

log = logging.getLogger("semmoe.vllm-cpu")
_MOE = "vllm.model_executor.layers.fused_moe."

EXPERTS = Hook(
    _MOE + "experts.cpu_moe.CPUUnquantizedExperts.apply",
    "rows whose experts are elsewhere",
    ("hidden_states", "topk_weights", "topk_ids", "expert_map"),
)
COMMUNICATOR = Hook(
    "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.__init__", "an expert all-to-all over gloo"
)
SELECTION = Hook(
    _MOE + "unquantized_fused_moe_method.select_unquantized_moe_backend", "rows in slots of experts", ("moe_config",)
)
KERNELS = Hook("vllm.triton_utils.dispatcher._rebind_kernels", "start where llvmlite is imported", ("overrides",))
HOOKS = (EXPERTS, COMMUNICATOR, SELECTION, KERNELS)


def patch() -> tuple[Hook, ...]:
    """Register the patches, and return what they reach into."""
    around(EXPERTS, _local_experts)
    around(COMMUNICATOR, _communicator)
    around(SELECTION, select_experts)
    patch_start()
    log.info(
        "semmoe: patching vLLM's CPU backend (experts of other ranks; an all-to-all over gloo, as its own lacks "
        "all_gatherv: vllm issue 57837)"
    )
    return HOOKS


def patch_start() -> None:
    """The part that every start in a process with numba needs."""
    around(KERNELS, _rebind)


def _local_experts(
    compute: Any,
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *others: Any,
    **named: Any,
) -> None:
    """vLLM's own computation, on the (token, expert) pairs whose expert is here; its own takes all to be here."""
    rest = (activation, global_num_experts, None, *others)
    if expert_map is None:
        compute(experts, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named)
        return
    local = torch.where(topk_ids >= 0, expert_map[topk_ids.long().clamp(min=0)], -1)
    rows, choices = (local >= 0).nonzero(as_tuple=True)
    output.zero_()
    if len(rows):
        x = hidden_states[rows]
        pairs = torch.empty_like(x)
        weights, ids = topk_weights[rows, choices, None], local[rows, choices, None].int()  # DeepEP's are int64
        compute(experts, pairs, x, w1, w2, weights.contiguous(), ids.contiguous(), *rest, **named)
        output.index_add_(0, rows, pairs)


def _rebind(original: Any, overrides: Any) -> None:
    """vLLM asks every attribute of every module for its kernel, and llvmlite's wrap whatever they are asked for."""
    names = [name for name in sys.modules if name.split(".")[0] == "llvmlite"]
    hidden = {name: sys.modules.pop(name) for name in names}
    try:
        original(overrides)
    finally:
        sys.modules.update(hidden)


def _communicator(init: Any, communicator: Any, *args: Any, **kwargs: Any) -> None:
    init(communicator, *args, **kwargs)
    if communicator.all2all_manager is not None:
        from semmoe_vllm_cpu import deepep
        from semmoe_vllm_cpu.dispatcher import GlooAllToAll

        communicator.all2all_manager = deepep.manager(communicator) or GlooAllToAll(communicator.cpu_group)
