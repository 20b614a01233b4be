"""What SGLang's model and runtime say of themselves: expert layers, norms, widths, buffers."""

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_parallel, get_resources, get_schedule
from sglang.srt.state_capturer.base import BaseTopkCapturer

from semmoe.core import Plan
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers, symmetric_buffers
from semmoe.topology import Fingerprint, Topology

MOST_REQUESTS = 4096  # that SGLang runs at a time where nothing is said
EXPERT_ID_BYTES = 4  # at most, as they travel with the rows


def all_to_all() -> bool:
    """Whether each rank's rows go to their experts, in place of all rows to all ranks."""
    return not get_moe_a2a_backend().is_none()


def prompts(batch: Any) -> bool:
    """Whether a pass is one over prompts, which is not replayed from a graph as those that decode are."""
    return batch.forward_mode.is_extend_without_speculative() and len(batch.input_ids) > 0


def moe_blocks(model: torch.nn.Module) -> dict[int, Any]:
    """SGLang's expert layers by decoder layer."""
    return {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}


def layer_of_norm(model: torch.nn.Module, layers: list[int]) -> dict[int, int]:
    """The identity of the norm before each decoder layer's feed-forward -> its place among the MoE layers."""
    found = {}
    for module in model.modules():
        boundary: Any = getattr(module, "ffn_boundary", None)
        blocks = moe_blocks(module) if boundary is not None else {}
        if len(blocks) == 1:
            found[id(boundary.norm)] = layers.index(next(iter(blocks)))
    name, number = type(model).__name__, len(layers)
    if len(found) != number:
        raise ValueError(
            f"{name}: tokens can be shuffled at {len(found)} of its {number} MoE layers only; set SEMMOE_SHUFFLE=off"
        )
    return found


def running_topology(plan: Plan | None) -> Topology:
    parallel = get_parallel()
    nodes = plan.topology.num_nodes if plan else 1
    return Topology(ep_size=parallel.moe_ep_size, dp_size=parallel.tp_size // parallel.attn_tp_size, num_nodes=nodes)


def peer_buffers(plan: Plan, runner: Any, comm: Communicator) -> PeerBuffers:
    """Large enough for any pass; raises ValueError where SEMMOE_FUSED=1 cannot be."""
    schedule, config = get_schedule(), runner.model_config
    prompts, requests = schedule.chunked_prefill_size or 0, schedule.max_running_requests or MOST_REQUESTS
    row_bytes = config.hf_text_config.hidden_size * config.dtype.itemsize + EXPERT_ID_BYTES * plan.fingerprint.top_k
    try:
        if prompts <= 0:
            raise ValueError("a pass over prompts has no largest size: give --chunked-prefill-size")
        return symmetric_buffers(comm, runner.device, config.dtype, (prompts + requests + comm.size) * row_bytes)
    except ValueError as error:
        raise ValueError(f"SEMMOE_FUSED=1: {error}") from None


def capture(layer_id: int, expert_ids: torch.Tensor) -> None:
    """(N, K) into SGLang's buffer of routed experts."""
    capturer = get_resources().experts_capturer
    if capturer is not None:
        BaseTopkCapturer.capture(capturer, layer_id, expert_ids.to(torch.int32))


def fingerprint(runner: Any) -> Fingerprint:
    from semmoe.engines.transformers.model import fingerprint_of

    return fingerprint_of(str(runner.model_config.model_path))
