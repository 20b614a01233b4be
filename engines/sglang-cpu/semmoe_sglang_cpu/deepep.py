"""SGLang's own DeepEP dispatchers on a CPU, V2's too, where a `deep_ep` can be imported: plain torch computes experts.

Its kernels for rows as DeepEP delivers them run on GPUs alone; here SGLang's native computation does it.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2
from sglang.srt.layers.moe.topk import StandardTopKOutput

from semmoe.engines.hooks import Hook
from semmoe.engines.sglang.registry import around

SMS = 132  # of the GPU that DeepEP's buffers are sized for

RUN = Hook(
    "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core",
    "experts of rows that DeepEP's dispatcher brought",
    ("dispatch_output",),
)
V2 = Hook(
    "sglang.srt.layers.moe.token_dispatcher.deepep_v2.DeepEPv2Dispatcher.__init__",
    "rows of any type and width, as DEEP_EP_CPU_ANY lets them be sent",
    ("params_dtype", "hidden_size", "activation_scale_block_size"),
)
HOOKS = (RUN, V2)


def present() -> bool:
    return find_spec("deep_ep") is not None


def patch() -> None:
    """Let SGLang's dispatchers take the CPU for a GPU with DeepGEMM, which nothing else there asks about."""
    around(RUN, _experts)
    around(V2, _any_rows)
    deepep.deep_gemm_wrapper = SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False
    )
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=SMS)


def _any_rows(make: Any, *args: Any, hidden_size: int, **given: Any) -> Any:
    """A V2 dispatcher that takes float32 rows of a small model for bfloat16 rows that could be scaled."""
    given |= {"params_dtype": torch.bfloat16, "activation_scale_block_size": hidden_size}
    return make(*args, hidden_size=hidden_size, **given)


def _experts(compute: Any, layer: Any, dispatch_output: Any) -> Any:
    if isinstance(dispatch_output, deepep.DeepEPNormalDispatchOutput):
        out = _native(layer, dispatch_output.hidden_states, dispatch_output.topk_ids, dispatch_output.topk_weights)
        return deepep.DeepEPNormalCombineInput(out, dispatch_output.topk_ids, dispatch_output.topk_weights)
    if isinstance(dispatch_output, deepep.DeepEPLLDispatchOutput):
        out = _by_expert(layer, dispatch_output.hidden_states, dispatch_output.masked_m)
        return deepep.DeepEPLLCombineInput(out, dispatch_output.topk_ids, dispatch_output.topk_weights)
    if isinstance(dispatch_output, deepep_v2.DeepEPv2DispatchOutput):
        run = _expanded if dispatch_output.is_expanded else _as_they_came
        return deepep_v2.DeepEPv2CombineInput(run(layer, dispatch_output), None)
    return compute(layer, dispatch_output)


def _as_they_came(layer: Any, arrived: Any) -> torch.Tensor:
    return _native(layer, arrived.hidden_states, arrived.topk_ids, arrived.topk_weights)


def _expanded(layer: Any, arrived: Any) -> torch.Tensor:
    """Rows by expert, of which each expert's begin at a multiple of the alignment and end where the handle says."""
    ends, up = arrived.psum_num_recv_tokens_per_expert.long(), arrived.expert_alignment
    begins = torch.cat([ends.new_zeros(1), (ends[:-1] + up - 1) // up * up])
    row = torch.arange(len(arrived.hidden_states))
    expert = torch.searchsorted(begins, row, right=True) - 1
    real = row < ends[expert]
    out = torch.full_like(arrived.hidden_states, torch.nan)
    chosen = expert[real][:, None], arrived.topk_weights[real][:, None]
    out[real] = _native(layer, arrived.hidden_states[real], *chosen)
    return out


def _by_expert(layer: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows (E / G, M, H) of which each expert's first are tokens; weights follow in combine."""
    real = torch.arange(rows.shape[1]) < counts[:, None]
    experts = real.nonzero()[:, :1]
    out = torch.full_like(rows, torch.nan)
    out[real] = _native(layer, rows[real], experts, torch.ones(experts.shape))
    return out


def _native(layer: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """SGLang's own computation; ids are this rank's, -1 for others'."""
    chosen = StandardTopKOutput(weights, ids, None)
    return fused_moe_native.moe_forward_native(layer, rows, chosen, layer.moe_runner_config)
