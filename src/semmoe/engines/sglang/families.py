"""Support for models whose experts SGLang 0.5.23 does not place: supply what their classes lack."""

from typing import Any

EXPERTS = {
    "MixtralForCausalLM": "num_local_experts",
    "OlmoeForCausalLM": "num_experts",
    "Glm4MoeForCausalLM": "n_routed_experts",
}  # where config.json counts them


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
