"""What a model's directory says of it, without the seconds that importing the model's code takes."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from semmoe.checkpoint.engine_files import decoder_layers
from semmoe.engines.transformers.tokenizer import digest, load_tokenizer, require_local, tokenizer_hash
from semmoe.topology import Fingerprint

# Configuration fields that affect routing; a plan is refused if any of them differs.
ARCHITECTURE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
    "intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def architecture_hash(config: PreTrainedConfig) -> str:
    return digest({field: getattr(config, field) for field in ARCHITECTURE_FIELDS if hasattr(config, field)})


def fingerprint_of(path: str) -> Fingerprint:
    """The fingerprint of a model directory, without loading its weights.

    Raises ValueError for a directory without safetensors, and for sizes that no model has.
    """
    require_local(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    groups = getattr(config, "n_group", None) or 1
    limited = groups > 1 and (getattr(config, "topk_group", None) or groups) < groups
    return Fingerprint(
        model=Path(path).resolve().name,
        architecture_hash=architecture_hash(config),
        tokenizer_hash=tokenizer_hash(load_tokenizer(path)),
        vocab_size=config.vocab_size,
        num_layers=len(decoder_layers(Path(path))[0]),
        num_experts=num_experts(config),
        top_k=config.num_experts_per_tok,
        num_groups=groups if limited else 1,
        hidden_size=config.hidden_size,
        expert_size=expert_size(config),
    )


def num_experts(config: PreTrainedConfig) -> int:
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, field, None):
            return getattr(config, field)
    raise ValueError(f"{config.model_type} has no experts")


def expert_size(config: PreTrainedConfig) -> int:
    """Width of one expert's feed-forward network."""
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def keeps_streams(config: PreTrainedConfig) -> bool:
    """Whether the residual is a stack of streams (hyper-connections), which only the model's own layers can mix."""
    return getattr(config, "hc_mult", None) is not None


def takes_padding(config: PreTrainedConfig) -> bool:
    """Whether padding on the left changes nothing: it shifts the windows of keys that attention compresses."""
    return not any("compressed" in kind for kind in getattr(config, "layer_types", None) or ())
