"""SGLang's own DeepEP dispatchers on a CPU, where a `deep_ep` can be imported: experts are computed by plain torch.

Its kernels for rows as DeepEP delivers them run on GPUs alone; here SGLang's native computation does it.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.token_dispatcher import deepep
from sglang.srt.layers.moe.topk import StandardTopKOutput

from semmoe.engines.hooks import Hook
from semmoe.engines.sglang.registry import around

SMS = 132  # of the GPU that DeepEP's buffers are sized for

RUN = Hook(
    "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core",
    "experts of rows that DeepEP's dispatcher brought",
    ("dispatch_output",),
)
HOOKS = (RUN,)


def present() -> bool:
    return find_spec("deep_ep") is not None


def patch() -> None:
    """Let SGLang's dispatchers take the CPU for a GPU with DeepGEMM, which nothing else there asks about."""
    around(RUN, _experts)
    deepep.deep_gemm_wrapper = SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False
    )
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=SMS)


def _experts(compute: Any, layer: Any, arrived: Any) -> Any:
    if isinstance(arrived, deepep.DeepEPNormalDispatchOutput):
        out = _native(layer, arrived.hidden_states, arrived.topk_ids, arrived.topk_weights)
        return deepep.DeepEPNormalCombineInput(out, arrived.topk_ids, arrived.topk_weights)
    if isinstance(arrived, deepep.DeepEPLLDispatchOutput):
        out = _by_expert(layer, arrived.hidden_states, arrived.masked_m)
        return deepep.DeepEPLLCombineInput(out, arrived.topk_ids, arrived.topk_weights)
    return compute(layer, arrived)


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
