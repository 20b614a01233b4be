"""DeepSpeed's configuration for a plan: AutoEP over all its ranks, folded with AutoTP of attention alone."""

from typing import Any

import torch

from semmoe.core import Plan
from semmoe.engines.deepspeed.versions import check_versions

PRESETS = {
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
}
# Projections to heads and from heads. DeepSeek's projections to and from the latent stay whole, as do all feed-forward
# layers, which run on a rank's own tokens.
TO_HEADS = r".*\.self_attn\.(q|k|v|q_b|kv_b)_proj\.weight$"
FROM_HEADS = r".*\.self_attn\.o_proj\.weight$"


def config_for(plan: Plan, model_config: Any) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize(model=..., config=...)` that follows from the plan's topology.

    Add further entries as needed. Raises ValueError for a model that AutoEP has no preset for, and for versions of
    DeepSpeed and transformers that do not work together.
    """
    family = model_config.model_type
    if family not in PRESETS:
        raise ValueError(f"AutoEP has no preset for {family}: it has {', '.join(sorted(PRESETS))}")
    check_versions(family)
    topology = plan.topology
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "expert_parallel": {
            "enabled": True,
            "autoep_size": topology.ep_size,
            "preset_model": PRESETS[family],
            "load_balance_coeff": None,
            "use_grouped_mm": torch.cuda.is_available(),
        },
    }
    if topology.attn_tp_size > 1:
        specs = [
            {"patterns": [TO_HEADS], "partition_type": "column"},
            {"patterns": [FROM_HEADS], "partition_type": "row"},
        ]
        partition = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": topology.attn_tp_size, "partition_config": partition}
    return config
