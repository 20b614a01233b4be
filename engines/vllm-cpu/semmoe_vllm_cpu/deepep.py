"""vLLM's own ways through DeepEP on a CPU, where one is asked for and a `deep_ep` can be imported.

Its experts for a CPU take rows in the layout of high-throughput mode. That of low latency has slots for each expert;
for it vLLM has a reference in plain torch that it offers to no platform.
"""

from importlib.util import find_spec
from typing import Any

HIGH_THROUGHPUT, LOW_LATENCY = "deepep_high_throughput", "deepep_low_latency"


def manager(communicator: Any) -> Any:
    """vLLM's all-to-all manager for the backend that a communicator was told, or None where it is another."""
    if communicator.all2all_backend not in (HIGH_THROUGHPUT, LOW_LATENCY) or find_spec("deep_ep") is None:
        return None
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

    # all2all_utils imports these for GPUs alone.
    all2all_utils.DeepEPHTPrepareAndFinalize = deepep_ht.DeepEPHTPrepareAndFinalize
    all2all_utils.DeepEPLLPrepareAndFinalize = deepep_ll.DeepEPLLPrepareAndFinalize
    all2all_utils.DEEPEP_QUANT_BLOCK_SHAPE = deepep_ll.DEEPEP_QUANT_BLOCK_SHAPE
    if communicator.all2all_backend == LOW_LATENCY:
        return all2all.DeepEPLLAll2AllManager(communicator.cpu_group)
    return all2all.DeepEPHTAll2AllManager(communicator.cpu_group)


def select_experts(select: Any, moe_config: Any) -> Any:
    """The backend, and its class of experts: the reference for rows in slots, vLLM's own choice else."""
    if not moe_config.moe_parallel_config.use_batched_activation_format:
        return select(moe_config=moe_config)
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    fused_batched_moe._is_capturing_or_compiling = lambda: False  # it asks an accelerator's stream
    return UnquantizedMoeBackend.BATCHED_TRITON, fused_batched_moe.NaiveBatchedExperts
