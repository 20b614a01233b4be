"""Support for models whose experts SGLang 0.5.23 does not place: supply what their classes lack."""

from typing import Any

from semmoe.checkpoint.directory import EXPERT_FIELDS

LACKING = {"MixtralForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM"}  # classes that a test has shown to lack it


def expert_sizes(untried: bool, original: Any, model_config: Any) -> Any:
    """Wraps SGLang's query of how many experts a model class places, where None means that it places none.

    untried: answer for any class, whose weights are then proven.
    """
    from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

    found, config = original(model_config), model_config.hf_text_config
    number = stated_experts(config)
    if found is not None or number is None or not (untried or model_config.hf_config.architectures[0] in LACKING):
        return found
    return ModelConfigForExpertLocation(
        num_layers=config.num_hidden_layers, num_logical_experts=number, num_groups=None
    )


def with_copies(original: Any, block: Any, num_experts: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps the construction of an expert layer, for models that construct it without slots for copies."""
    from sglang.srt.runtime_context import get_exec, get_flags, process_model_config

    lacks = (
        num_experts == stated_experts(process_model_config().hf_text_config)
        and not get_flags().moe.in_speculative_scope
    )
    return original(block, num_experts + get_exec().moe.ep_num_redundant_experts * lacks, *args, **kwargs)


def stated_experts(config: Any) -> int | None:
    """The number of experts of a layer that a configuration states."""
    return next((value for name in EXPERT_FIELDS if (value := getattr(config, name, None)) is not None), None)
