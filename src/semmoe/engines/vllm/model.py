"""Read facts from vLLM's model, and hooks without state."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode, get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from semmoe.engines.settings import unseen_in_graphs
from semmoe.engines.vllm.launch import NOT_RETURNED
from semmoe.engines.vllm.placement import PlacedExperts
from semmoe.engines.vllm.routing import RoutedLayer
from semmoe.topology import Topology

log = logging.getLogger(__name__)


def moe_blocks(model: torch.nn.Module) -> dict[int, Any]:
    """vLLM's expert layers by decoder layer."""
    return {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}


def experts_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The modules with the experts' weights, by decoder layer."""
    return {layer: block.routed_experts for layer, block in moe_blocks(model).items()}


def made(placed: PlacedExperts, original: Any, experts: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:
    """Wraps the construction of a layer's experts."""
    placed.made(layer_name)
    original(experts, layer_name, *args, **kwargs)


def hook_routers(blocks: Sequence[Any], routed: Sequence[RoutedLayer]) -> list[int]:
    """Hook the routers of a model's MoE layers; returns those that cannot be, whose kernels route by themselves."""
    unseen = []
    for place, (block, layer) in enumerate(zip(blocks, routed, strict=True)):
        if block.is_monolithic or not isinstance(block.router, BaseRouter) or block.do_naive_dispatch_combine:
            unseen.append(place)
        else:
            hook_router(block.router, layer)
    return unseen


def hook_router(router: Any, layer: RoutedLayer) -> None:
    """Hook one router object, since subclasses have a `_compute_routing` of their own."""
    compute = router._compute_routing

    def routing(*args: Any, **kwargs: Any) -> Any:
        weights, expert_ids = compute(*args, **kwargs)
        layer.routed(weights, expert_ids)
        return weights, expert_ids

    router._compute_routing = routing
    router._apply_eplb_mapping = layer.to_physical


def running_topology(runner: Any, num_nodes: int) -> Topology:
    groups = runner.vllm_config.parallel_config.data_parallel_size
    return Topology(ep_size=get_ep_group().world_size, dp_size=groups, num_nodes=num_nodes)


def check_engine(runner: Any, schedules: bool) -> None:
    """Raise ValueError if vLLM runs in a mode in which no plan can be served."""
    config = runner.vllm_config.parallel_config
    if not config.enable_expert_parallel:
        raise ValueError("a plan needs --enable-expert-parallel")
    elsewhere = config.data_parallel_external_lb or config.data_parallel_hybrid_lb
    if elsewhere and schedules:
        raise ValueError(
            "another load balancer than vLLM's own chooses ranks, and the "
            "plan schedules no request: set SEMMOE_SCHEDULE=engine"
        )
    if runner.vllm_config.weight_transfer_config is not None:
        raise ValueError("weights cannot be loaded again into an engine on a plan: omit --weight-transfer-config")
    if config.enable_eplb:
        raise ValueError("--enable-eplb would move the plan's experts: omit it")
    if config.pipeline_parallel_size != 1:
        raise ValueError("a plan cannot be served with pipeline parallelism")
    if config.tensor_parallel_size != 1 and config.data_parallel_size != 1 and not config.use_sequence_parallel_moe:
        raise ValueError(
            f"--all2all-backend {config.all2all_backend} sends the tokens of an attention group many times"
        )


def check_eager(runner: Any, what: str) -> None:
    mode = runner.vllm_config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise ValueError(f"{what} cannot be compiled: give --enforce-eager")


def refuse_v2(original: Any, *args: Any, **kwargs: Any) -> None:
    log.critical("semmoe knows vLLM's first model runner only: set VLLM_USE_V2_MODEL_RUNNER=0; vLLM does not start")
    raise ValueError("semmoe needs VLLM_USE_V2_MODEL_RUNNER=0")


def split_tokens(original: Any, config: Any) -> bool:
    return original(config) or (config.enable_expert_parallel and config.tensor_parallel_size > 1)


def split_experts(
    original: Any, tp_size: Any, dp_size: Any, pcp_size: Any, is_sequence_parallel: bool, parallel_config: Any
) -> Any:
    """Wraps vLLM's choice to split rows, for all families, since it leaves the rows of some whole."""
    split = is_sequence_parallel or parallel_config.use_sequence_parallel_moe
    return original(tp_size, dp_size, pcp_size, split, parallel_config)


def whole_shared_experts(original: Any, linear: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the construction of shared experts: a rank that computes only its own rows needs the whole expert."""
    config = get_current_vllm_config().parallel_config
    if "shared_expert" in kwargs.get("prefix", "") and config.use_sequence_parallel_moe:
        kwargs["disable_tp"] = True
    original(linear, *args, **kwargs)


def graphs(runner: Any) -> CUDAGraphMode:
    """vLLM's mode of CUDA graphs, which it may still turn down, not up."""
    return runner.vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE


def captures(runner: Any) -> bool:
    """Whether vLLM captures passes in CUDA graphs."""
    return graphs(runner) != CUDAGraphMode.NONE


def routing_buffer(runner: Any, split: int, num_layers: int, top_k: int) -> torch.Tensor:
    """Where hooks put the routing of a pass, (rows, L, K), with padding to whole slices of `split` ranks."""
    return torch.zeros((runner.max_num_tokens + split, num_layers, top_k), dtype=torch.int32, device=runner.device)


def check_split(runner: Any) -> None:
    """Raise ValueError if vLLM would take a rank's slice of the tokens for all tokens of its attention group."""
    draft = getattr(getattr(runner, "drafter", None), "model", None)
    if isinstance(draft, torch.nn.Module) and moe_blocks(draft):
        raise ValueError(
            "a draft model with experts cannot run where a plan splits tokens: choose another way to "
            "speculate, or attention dp"
        )
    if runner.vllm_config.aux_output_config.enable_return_routed_experts:
        raise ValueError(NOT_RETURNED)


def why_unrecorded(shuffles: bool, split: int, captured: bool) -> str:
    """Why a rank does not see every row of its attention group; "" if it does.

    split: ranks that share its rows. captured: passes are replayed from graphs, and none has a buffer for routing.
    """
    if captured:
        return unseen_in_graphs("--enforce-eager")
    if shuffles:
        return ""
    if split > 1:
        return "each rank of an attention-TP group sees a slice of the tokens; serve on a plan, which shuffles them"
    return ""
