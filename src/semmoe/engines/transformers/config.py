"""Read a model directory's configuration, without the seconds that importing the model's code takes."""

from importlib.metadata import version
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from semmoe.checkpoint.directory import EXPERT_FIELDS, TOP_K_FIELDS, config_file, uniform
from semmoe.checkpoint.layout import decoder_layers
from semmoe.engines.transformers.tokenizer import LOCAL_AND_INERT, digest, load_tokenizer, one_line, tokenizer_hash
from semmoe.io.files import read_object
from semmoe.topology import Fingerprint

# Configuration fields that affect routing; a plan is refused if any field differs.
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


# Types that transformers knows under another name. It reads Kimi-K2 inside of Kimi-K2.5 so, too.
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}


def architecture_hash(config: PreTrainedConfig) -> str:
    return digest({field: getattr(config, field) for field in ARCHITECTURE_FIELDS if hasattr(config, field)})


def load_config(path: str) -> PreTrainedConfig:
    """Read a model directory's configuration with transformers' own class for its type; no code of it is run.

    Raises ValueError for a type that transformers does not know, and for values that its class refuses.
    """
    stated = read_object(config_file(Path(path)))
    kind = stated.get("model_type")
    kind = SAME_ARCHITECTURE.get(kind, kind) if isinstance(kind, str) else None
    if kind not in CONFIG_MAPPING:
        known = f"transformers {version('transformers')} does not know models of type {stated.get('model_type')!r}"
        raise ValueError(f"{path}: {known}, and semmoe runs no code that a model directory brings")
    if "/" in str(stated.get("attn_implementation")):  # transformers would load a kernel of that name from the hub
        raise ValueError(f"{path}: config.json names an attention kernel of the hub: remove attn_implementation")
    try:
        if kind != stated["model_type"]:  # without auto_map, which names code of the directory
            return CONFIG_MAPPING[kind].from_dict(stated | {"model_type": kind, "auto_map": {}})
        return AutoConfig.from_pretrained(path, **LOCAL_AND_INERT)
    except Exception as error:  # transformers raises almost any exception on values that it does not expect
        raise ValueError(f"{path}: transformers cannot read config.json: {one_line(error)}") from None


def fingerprint_of(path: str) -> Fingerprint:
    """The fingerprint of a model directory, without loading its weights.

    Sizes are those of the language part: in models with images or sound, of `text_config`. Raises ValueError for a
    directory without safetensors, for a model without experts, and for sizes that no model has.
    """
    config = load_config(path).get_text_config(decoder=True)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"{path}: transformers knows no text_config in models of its type")
    try:
        groups = _size(config, "n_group", default=1)
        limited = _size(config, "topk_group", default=groups) < groups
        return Fingerprint(
            model=Path(path).resolve().name,
            vocab_size=_size(config, "vocab_size"),
            num_experts=num_experts(config),
            top_k=top_k(config),
            num_groups=groups if limited else 1,
            hidden_size=_size(config, "hidden_size"),
            expert_size=expert_size(config),
            num_layers=len(decoder_layers(Path(path))[0]),
            architecture_hash=architecture_hash(config),
            tokenizer_hash=tokenizer_hash(load_tokenizer(path)),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if str(Path(path)) in message else f"{path}: {message}") from None


def _size(config: PreTrainedConfig, *names: str, default: int | None = None) -> int:
    """The first field of `names` that is set, or `default`. Raises ValueError unless it is a positive whole number."""
    value = uniform(next((getattr(config, name) for name in names if getattr(config, name, None)), default))
    if type(value) is not int or value < 0:
        raise ValueError(f"a model of type {config.model_type!r} has {value!r} for {' or '.join(names)}, not a size")
    return value


def num_experts(config: PreTrainedConfig) -> int:
    return _size(config, *EXPERT_FIELDS)


def top_k(config: PreTrainedConfig) -> int:
    return _size(config, *TOP_K_FIELDS)


def expert_size(config: PreTrainedConfig) -> int:
    """Width of an expert's feed-forward network; 0 if the configuration does not say."""
    return _size(config, "moe_intermediate_size", "intermediate_size", default=0)


def takes_padding(config: PreTrainedConfig) -> bool:
    """Whether padding on the left changes nothing: it shifts windows of compressed keys, and an indexer's choice."""
    compresses = any("compressed" in kind for kind in getattr(config, "layer_types", None) or ())
    return not compresses and getattr(config, "index_topk", None) is None
