"""What SGLang 0.5.23 lacks on a CPU, and nothing else: it plays no part where there is a GPU.

With these patches its real scheduler, models and collectives run expert parallelism in plain processes. Each is a gap
of the CPU backend that vanilla SGLang has too; none changes a result.
"""

import logging
from importlib.util import find_spec
from typing import Any

import torch
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel

from semmoe.engines.hooks import Hook
from semmoe.engines.sglang.model import all_to_all
from semmoe.engines.sglang.registry import around
from semmoe.runtime.collectives import Communicator
from semmoe_sglang_cpu import deepep
from semmoe_sglang_cpu.dispatcher import GlooDispatcher

POLL_MS = 5  # a request ends the wait at once; requests that are held may wait for so long beyond their window
log = logging.getLogger("semmoe.sglang-cpu")
_SRT = "sglang.srt."
_MOE = _SRT + "layers.moe."

EXPERTS = Hook(
    _MOE + "fused_moe_native.moe_forward_native",
    "rows whose experts are elsewhere (id -1)",
    ("layer", "x", "topk_output", "moe_runner_config"),
)
DISPATCHER = Hook(
    _MOE + "fused_moe_triton.layer.create_moe_dispatcher", "an expert all-to-all over gloo", ("moe_runner_config",)
)
EXPERT_CLASS = Hook(_MOE + "ep_moe.layer.get_moe_impl_class", "the layer that runs without DeepEP", ())
CONTROLLER = Hook(
    _SRT + "managers.data_parallel_controller.DataParallelController.event_loop",
    "wait for requests without taking a core from the ranks",
    (),
)
ROPE = Hook(
    _SRT + "layers.rotary_embedding.factory.get_rope_cpu",
    "latent attention without scaled positions",
    ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling", "dtype"),
)
HOOKS = (EXPERTS, DISPATCHER, EXPERT_CLASS, CONTROLLER, ROPE)


def patch(comms: list[Communicator]) -> tuple[Hook, ...]:
    """Register the patches, and return what they reach into.

    The communicator that all layers' dispatchers share is added to `comms`.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common

    def dispatcher(make: Any, moe_runner_config: Any, **others: Any) -> Any:
        if not all_to_all() or deepep.present():
            return make(moe_runner_config, **others)
        if not comms:
            parallel = get_parallel()
            group = parallel.tp_group.device_group
            comms.append(Communicator(group, parallel.moe_ep_rank, parallel.moe_ep_size))
        return GlooDispatcher(comms[0], moe_runner_config.num_local_experts)

    around(EXPERTS, _local_experts)
    around(DISPATCHER, dispatcher)
    around(EXPERT_CLASS, _expert_class)
    around(CONTROLLER, _wait_for_requests)
    around(ROPE, _rope)
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        if name not in vars(TorchNativeAttnBackend):
            setattr(TorchNativeAttnBackend, name, lambda self: 1)
    for name, value in (("is_current_stream_capturing", False), ("empty_cache", None)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda value=value: value)
    common.ALLOC_MEMORY_FUNCS["cpu"] = _host_memory
    if find_spec("mooncake") is not None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False  # it would pin memory for a GPU's copy of page numbers
    sends = "all-to-all over gloo"
    if deepep.present():
        deepep.patch()
        sends = "SGLang's DeepEP dispatchers with the deep_ep at hand"
    log.info("semmoe: patching SGLang's CPU backend (experts of other ranks, %s)", sends)
    return HOOKS + (deepep.HOOKS if deepep.present() else ())


def _local_experts(compute: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """SGLang's own computation, on the (token, expert) pairs whose expert is here (id not -1)."""
    weights, ids = topk_output.topk_weights, topk_output.topk_ids
    rows, choices = (ids >= 0).nonzero(as_tuple=True)
    out = torch.zeros_like(x)
    if len(rows):
        pairs = StandardTopKOutput(weights[rows, choices][:, None], ids[rows, choices][:, None], None)
        out.index_add_(0, rows, compute(layer, x[rows], pairs, config).to(out.dtype))
    return out


def _expert_class(choose: Any, quant_config: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE if all_to_all() and not deepep.present() else choose(quant_config)


def _rope(
    make: Any,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """SGLang's own makes those of `deepseek_yarn` alone."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    if rope_scaling is None:
        return get_rope(head_size, rotary_dim, max_position, base, is_neox_style)
    return make(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *args, **kwargs)


def _wait_for_requests(loop: Any, controller: Any) -> Any:
    """SGLang's loop asks for requests without a pause, which costs ranks that share its cores two thirds of one."""
    feed = controller.soft_watchdog.feed

    def wait_and_feed() -> None:
        controller.recv_from_tokenizer.poll(POLL_MS)
        feed()

    controller.soft_watchdog.feed = wait_and_feed
    return loop(controller)


def _host_memory(dims: Any, dtype: torch.dtype, device: str = "cpu", pin_memory: bool = False, **unused: Any):
    return torch.empty(dims, dtype=dtype, device="cpu")
