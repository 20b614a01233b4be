"""vLLM's own way through DeepEP's high-throughput mode on a CPU, where it is asked for and a `deep_ep` can be imported.

Its experts for a CPU take rows in the layout that this mode delivers. Low latency delivers another, for which it has
none.
"""

from importlib.util import find_spec
from typing import Any

BACKEND = "deepep_high_throughput"


def manager(communicator: Any) -> Any:
    """vLLM's all-to-all manager for the backend that a communicator was told, or None where it is another."""
    if communicator.all2all_backend != BACKEND or find_spec("deep_ep") is None:
        return None
    from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize

    all2all_utils.DeepEPHTPrepareAndFinalize = DeepEPHTPrepareAndFinalize  # which it imports for GPUs alone
    return DeepEPHTAll2AllManager(communicator.cpu_group)
