"""Read facts from SGLang's model and runtime: expert layers, norms, widths, buffers."""

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.runtime_context import get_parallel, get_resources, get_schedule, get_spec
from sglang.srt.state_capturer.base import BaseTopkCapturer

from semmoe.engines.settings import unseen_in_graphs
from semmoe.topology import Topology

MOST_REQUESTS = 4096  # most requests that SGLang runs at a time by default


def all_to_all() -> bool:
    """Whether SGLang sends rows to the ranks of their experts only, instead of all rows to all ranks."""
    return not get_moe_a2a_backend().is_none()


def prompts(batch: Any) -> bool:
    """Whether a pass runs over prompts, so that it is not replayed from a graph, unlike decode passes."""
    return batch.forward_mode.is_extend_without_speculative() and len(batch.input_ids) > 0


def moe_blocks(model: torch.nn.Module) -> dict[int, Any]:
    """SGLang's expert layers by decoder layer."""
    return {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}


def layer_of_norm(model: torch.nn.Module, layers: list[int]) -> dict[int, int]:
    """Maps the identity of the norm before each feed-forward to the index of its layer among the MoE layers."""
    found = {id(module.ffn_boundary.norm): layers.index(layer) for layer, module in _expert_layers(model).items()}
    name, number = type(model).__name__, len(layers)
    if len(found) != number:
        raise ValueError(
            f"{name}: tokens can be shuffled at {len(found)} of its {number} MoE layers only; set SEMMOE_SHUFFLE=off"
        )
    return found


def _expert_layers(model: torch.nn.Module) -> dict[int, Any]:
    """The model's decoder layers with experts and a boundary before them, by their index."""
    found = {}
    for module in model.modules():
        blocks = moe_blocks(module) if getattr(module, "ffn_boundary", None) is not None else {}
        if len(blocks) == 1:
            found[next(iter(blocks))] = module
    return found


def check_attention_dp(model: torch.nn.Module, num_heads: int) -> None:
    """Raise ValueError unless SGLang's class of this model runs in attention-DP, which SGLang itself does not check."""
    name, parallel = type(model).__name__, get_parallel()
    if len(_expert_layers(model)) != len(moe_blocks(model)):
        raise ValueError(f"SGLang's {name} has no boundaries around its experts for attention-DP: give --engine vllm")
    for module in model.modules() if parallel.tp_size > parallel.attn_tp_size else ():
        heads = isinstance(module, RadixAttention) and module.tp_q_head_num * parallel.tp_size <= num_heads
        if heads or (type(module) is VocabParallelEmbedding and module.tp_size > parallel.attn_tp_size):
            raise ValueError(f"SGLang's {name} splits attention or embeddings over all ranks: give --engine vllm")


def running_topology(num_nodes: int) -> Topology:
    parallel = get_parallel()
    groups = parallel.tp_size // parallel.attn_tp_size
    return Topology(ep_size=parallel.moe_ep_size, dp_size=groups, num_nodes=num_nodes)


def most_rows() -> int:
    """Return the rows of the largest pass, without padding; 0 if unlimited."""
    schedule = get_schedule()
    prompts, requests = schedule.chunked_prefill_size or 0, schedule.max_running_requests or MOST_REQUESTS
    return prompts + requests if prompts > 0 else 0


def routing_buffer(runner: Any, num_layers: int, top_k: int) -> torch.Tensor:
    """Where hooks put the routing of a pass, (rows, L, K), with padding to whole slices."""
    shape = most_rows() + get_parallel().attn_tp_size, num_layers, top_k
    return torch.zeros(shape, dtype=torch.int32, device=runner.device)


def capture(layer_id: int, expert_ids: torch.Tensor) -> None:
    """Write expert ids (N, K) of a layer to SGLang's buffer of routed experts."""
    capturer = get_resources().experts_capturer
    if capturer is not None:
        BaseTopkCapturer.capture(capturer, layer_id, expert_ids.to(torch.int32))


def why_unrecorded(shuffles: bool, buffered: bool) -> str:
    """Why a rank does not see every row of its attention group; "" if it does.

    buffered: whether routing is put into a buffer, as graphs need.
    """
    parallel = get_parallel()
    if get_spec().speculative_algorithm:
        return "with speculative decoding it is not known in a pass which of its tokens are accepted"
    if not buffered and not cuda_graph_fully_disabled():
        return unseen_in_graphs("--disable-cuda-graph")
    if buffered and most_rows() <= 0:
        return "a pass over prompts has no largest size, and SEMMOE_RECORD=1 needs one: give --chunked-prefill-size"
    if shuffles:
        return ""
    if all_to_all() and parallel.attn_tp_size > 1:
        return "each rank of an attention-TP group sees a slice of the tokens; serve on a plan, which shuffles them"
    if not all_to_all() and parallel.attn_tp_size < parallel.tp_size:
        return "without an all-to-all a rank sees the rows of other data-parallel ranks too"
    return ""
