"""Support for models whose experts SGLang 0.5.23 does not place: supply what their classes lack, or refuse the plan.

This module can be imported without SGLang, so that a plan is refused before anything loads.
"""

from typing import Any

from semmoe.core import Plan

EXPERTS = {
    "MixtralForCausalLM": "num_local_experts",
    "OlmoeForCausalLM": "num_experts",
    "Glm4MoeForCausalLM": "n_routed_experts",
}  # where config.json counts them


def check_family(architecture: str, plan: Plan) -> None:
    """Raise ValueError if SGLang's model class cannot serve the plan."""
    if architecture == "GptOssForCausalLM":
        raise ValueError(
            "SGLang's gpt-oss has no expert all-to-all, and its loader places no "
            "experts: serve the plan on vLLM, or give SGLang what `semmoe apply` writes"
        )
    if architecture == "OlmoeForCausalLM" and plan.topology.ep_size != 1:
        raise ValueError(
            "SGLang's OlmoeForCausalLM runs on one "
            "rank alone, since it normalises queries over all heads: serve the plan on vLLM"
        )
    if architecture == "MixtralForCausalLM" and plan.topology.dp_size != 1:
        raise ValueError("SGLang's MixtralForCausalLM splits attention over all ranks: solve a plan for attention tp")


def expert_sizes(original: Any, model_config: Any) -> Any:
    """Wraps SGLang's query of how many experts a model class places, where None means that it places none."""
    from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

    found, config = original(model_config), model_config.hf_config
    name = EXPERTS.get(config.architectures[0])
    if found is not None or name is None:
        return found
    return ModelConfigForExpertLocation(
        num_layers=config.num_hidden_layers, num_logical_experts=getattr(config, name), num_groups=None
    )


def with_copies(original: Any, block: Any, num_experts: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps the construction of an expert layer, for models that construct it without slots for copies."""
    from sglang.srt.runtime_context import get_exec, get_flags, process_model_config

    architecture = process_model_config().hf_config.architectures[0]
    lacks = architecture in EXPERTS and not get_flags().moe.in_speculative_scope
    return original(block, num_experts + get_exec().moe.ep_num_redundant_experts * lacks, *args, **kwargs)
