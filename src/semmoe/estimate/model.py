"""What of a model costs time and memory, read from its Hugging Face `config.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from semmoe.bounds import MOST_EXPERTS, MOST_LAYERS, MOST_VOCABULARY
from semmoe.cost import LayerShape
from semmoe.files import read_limited

MOST_CONFIG_BYTES = 1 << 24
MOST_WIDTH = 1 << 24
# Fields of families: the experts of a layer, the width of one, the width of all shared experts together, if any.
FAMILIES = {
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    "kimi_k2": ("n_routed_experts", "moe_intermediate_size"),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size"),
    "qwen2_moe": ("num_experts", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
}
STORED = {"fp8": (1.0, 1.0), "bf16": (2.0, 2.0), "mxfp4": (2.0, 4.25 / 8)}  # bytes per dense weight, per expert weight


@dataclass(frozen=True)
class Projection:
    """A matrix of the attention block: (inputs, outputs) weights of `stored` bytes each."""

    inputs: int
    outputs: int
    stored: float
    split: bool = True  # over the ranks of an attention group, by heads


class Attention(Protocol):
    """One kind of attention. Widths are of all heads; S ranks of a group share the heads."""

    def projections(self, hidden: int, stored: float, decode: bool) -> list[Projection]: ...
    def pair_flops(self, decode: bool) -> int: ...  # floating-point operations per (query token, key token)
    def kept_values(self, ranks: int) -> float: ...  # values that each of `ranks` keeps per token and layer
    def keys_seen(self, context: float) -> float: ...  # mean of layers


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Multi-head and grouped-query attention; a share of the layers may see a window of keys only."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    windowed: float = 0.0  # share of layers

    def projections(self, hidden: int, stored: float, decode: bool) -> list[Projection]:
        of_heads = self.heads * self.head_dim
        together = of_heads + 2 * self.kv_heads * self.head_dim
        return [Projection(hidden, together, stored), Projection(of_heads, hidden, stored)]

    def pair_flops(self, decode: bool) -> int:
        return 4 * self.heads * self.head_dim

    def kept_values(self, ranks: int) -> float:
        return 2 * max(self.kv_heads / ranks, 1) * self.head_dim

    def keys_seen(self, context: float) -> float:
        return (1 - self.windowed) * context + self.windowed * min(context, self.window)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are kept as one latent vector.

    Decoding works on the latents ("absorbed"): two products per head, in BF16, take the place of the projection from
    the latents. Every rank of a group keeps all of the latent.
    """

    heads: int
    q_rank: int  # 0: queries are projected in one step
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def projections(self, hidden: int, stored: float, decode: bool) -> list[Projection]:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        first = [Projection(hidden, self.q_rank + self.kv_rank + self.rope_dim, stored, split=False)]
        if not self.q_rank:
            first.append(Projection(hidden, queries, stored))
        else:
            first.append(Projection(self.q_rank, queries, stored))
        widths = (self.nope_dim, self.value_dim) if decode else (self.nope_dim + self.value_dim,)
        unfold = [Projection(self.kv_rank, self.heads * width, 2.0 if decode else stored) for width in widths]
        return [*first, *unfold, Projection(self.heads * self.value_dim, hidden, stored)]

    def pair_flops(self, decode: bool) -> int:
        wide = 2 * self.kv_rank + self.rope_dim if decode else self.nope_dim + self.rope_dim + self.value_dim
        return 2 * self.heads * wide

    def kept_values(self, ranks: int) -> float:
        return self.kv_rank + self.rope_dim

    def keys_seen(self, context: float) -> float:
        return context


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model. Widths of feed-forward networks are those of gated ones: three matrices."""

    name: str
    hidden_size: int
    num_layers: int
    dense_layers: int  # of them without experts
    dense_size: int
    num_experts: int  # routed, of a layer
    expert_size: int
    top_k: int
    shared_size: int  # of all shared experts together; 0: none
    vocab_size: int
    tied: bool  # the head is the embedding
    attention: Attention
    dense_bytes: float  # per weight outside routed experts
    expert_bytes: float  # per weight of a routed expert

    @property
    def moe_layers(self) -> int:
        return self.num_layers - self.dense_layers

    @property
    def layer_shape(self) -> LayerShape:
        return LayerShape(hidden_size=self.hidden_size, expert_size=self.expert_size, top_k=self.top_k)

    @property
    def bytes_per_expert(self) -> float:
        return 3 * self.hidden_size * self.expert_size * self.expert_bytes

    def bytes_per_gpu(self, attn_ranks: int, local_experts: float) -> float:
        """Bytes of the weights on each GPU, whose attention group has `attn_ranks`."""
        attention = sum(
            p.inputs * p.outputs * p.stored / (attn_ranks if p.split else 1)
            for p in self.attention.projections(self.hidden_size, self.dense_bytes, decode=True)
        )
        dense = 3 * self.hidden_size * self.dense_size * self.dense_bytes / attn_ranks * self.dense_layers
        shared = 3 * self.hidden_size * self.shared_size * self.dense_bytes
        of_moe = shared + local_experts * self.bytes_per_expert + 2 * self.hidden_size * self.num_experts
        embeddings = (1 if self.tied else 2) * 2 * self.vocab_size * self.hidden_size
        return attention * self.num_layers + dense + of_moe * self.moe_layers + embeddings


class _Config:
    """The fields of a configuration; errors name the file and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(bytes(read_limited(self.path, MOST_CONFIG_BYTES)))
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} is not a JSON object")
        self.fields: dict[str, Any] = found

    def number(self, name: str, high: int = MOST_WIDTH, default: int | None = None) -> int:
        """An integer field of at least 1, or `default`."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(f"{self.path} has no {name}, which an estimate needs")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise ValueError(f"{self.path}: {name} must be a whole number from 1 to {high:,}, not {value!r}")
        return value

    def listed(self, name: str) -> list[Any]:
        value = self.fields.get(name) or []
        if not isinstance(value, list):
            raise ValueError(f"{self.path}: {name} must be a list, not {value!r}")
        return value


def read_model(path: Path, weights: str = "auto") -> ModelSizes:
    """The sizes of the model in a directory, or of a `config.json`.

    weights: "fp8" or "bf16" in place of what the configuration says. Raises ValueError for a family that is not known,
    and naming the field that is missing.
    """
    config = _Config(path)
    family = config.fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{config.path}: nothing is known of model_type {family!r}; known are {known}")
    experts, width = FAMILIES[family]
    alias = "num_local_experts" if experts == "num_experts" and experts not in config.fields else experts
    layers = config.number("num_hidden_layers", MOST_LAYERS)
    dense = _dense_layers(config, layers)
    dense_bytes, expert_bytes = STORED[_stored(config, weights)]
    sizes = ModelSizes(
        name=config.path.resolve().parent.name,
        hidden_size=config.number("hidden_size"),
        num_layers=layers,
        dense_layers=dense,
        dense_size=config.number("intermediate_size") if dense else 0,
        num_experts=config.number(alias, MOST_EXPERTS),
        expert_size=config.number(width),
        top_k=config.number("num_experts_per_tok", MOST_EXPERTS),
        shared_size=_shared_size(config, width),
        vocab_size=config.number("vocab_size", MOST_VOCABULARY),
        tied=config.fields.get("tie_word_embeddings") is True,
        attention=_latent(config) if config.fields.get("kv_lora_rank") is not None else _grouped(config, layers),
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes,
    )
    if sizes.top_k > sizes.num_experts:
        raise ValueError(f"{config.path}: {sizes.top_k} experts per token exceed {sizes.num_experts} experts")
    return sizes


def _dense_layers(config: _Config, layers: int) -> int:
    """The number of layers that have no experts."""
    first = config.number("first_k_dense_replace", MOST_LAYERS, 0) if config.fields.get("first_k_dense_replace") else 0
    step = config.number("decoder_sparse_step", MOST_LAYERS, 1) * config.number("moe_layer_freq", MOST_LAYERS, 1)
    only = {layer for layer in config.listed("mlp_only_layers") if isinstance(layer, int)}
    offset = 1 if "decoder_sparse_step" in config.fields else 0
    sparse = sum(i >= first and i not in only and (i + offset) % step == 0 for i in range(layers))
    if sparse == 0:
        raise ValueError(f"{config.path}: no layer has experts")
    return layers - sparse


def _shared_size(config: _Config, width: str) -> int:
    if config.fields.get("n_shared_experts"):
        return config.number("n_shared_experts") * config.number(width)
    return config.number("shared_expert_intermediate_size", default=0)


def _stored(config: _Config, weights: str) -> str:
    """How weights are stored, one of STORED."""
    if weights != "auto":
        return weights
    quantized = config.fields.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if quantized is not None and (not isinstance(method, str) or method not in STORED):
        raise ValueError(f"{config.path}: nothing is known of quantization by {method!r}: give --weights fp8 or bf16")
    return method or "bf16"


def _grouped(config: _Config, layers: int) -> Grouped:
    heads = config.number("num_attention_heads")
    kinds = config.listed("layer_types")
    windowed = min(kinds.count("sliding_attention") / layers, 1.0) if config.fields.get("sliding_window") else 0.0
    return Grouped(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", default=heads),
        head_dim=config.number("head_dim", default=max(config.number("hidden_size") // heads, 1)),
        window=config.number("sliding_window") if windowed else 0,
        windowed=windowed,
    )


def _latent(config: _Config) -> Latent:
    return Latent(
        heads=config.number("num_attention_heads"),
        q_rank=config.number("q_lora_rank", default=0),
        kv_rank=config.number("kv_lora_rank"),
        rope_dim=config.number("qk_rope_head_dim"),
        nope_dim=config.number("qk_nope_head_dim"),
        value_dim=config.number("v_head_dim"),
    )
