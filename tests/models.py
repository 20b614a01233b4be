"""Small, randomly initialised MoE models of several architectures, saved as Hugging Face checkpoints."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer

# Wide initial weights: router scores and logits far enough apart that a fault, not a near-tie, changes an output.
COMMON = {"vocab_size": 4096, "hidden_size": 64, "num_attention_heads": 4, "initializer_range": 0.25,
          "num_experts_per_tok": 2, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "intermediate_size": 64,
          "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_layer_freq": 1}  # fmt: skip

# What published configurations say otherwise than transformers writes it. Kimi-K2 names code of its own.
STATED = {
    "kimi_k2": {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    },
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "afmoe": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "mup_enabled": False,
        "n_group": 1,
        "topk_group": 1,
    },
}


def without_top_k() -> dict[str, object]:
    """For families that name the number of experts per token in another way."""
    return {name: value for name, value in COMMON.items() if name != "num_experts_per_tok"}


CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=8, moe_intermediate_size=32,
        intermediate_size=64,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_local_experts=8, intermediate_size=48,
        sliding_window=None,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **COMMON, **LATENT, n_routed_experts=8, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=1.0, scoring_func="softmax",
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **COMMON, **LATENT, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.0,
        topk_method="noaux_tc", scoring_func="sigmoid",
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_local_experts=8, intermediate_size=48,
        sliding_window=16,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, n_routed_experts=8, n_shared_experts=1,
        moe_intermediate_size=32, intermediate_size=64, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=4, num_experts=8, intermediate_size=48,
    ),
    # Two hash-routed layers and two others; attention of all three kinds, with windows that short prompts fill.
    "deepseek_v4": lambda: transformers.DeepseekV4Config(
        **COMMON, num_hidden_layers=4, num_hash_layers=2, head_dim=16, q_lora_rank=24, partial_rotary_factor=0.5,
        n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=32, hc_mult=2, o_groups=2, o_lora_rank=16,
        index_n_heads=2, index_head_dim=16, index_topk=3, sliding_window=16,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
                     "sliding_attention"],
    ),
    # Kimi-K2: DeepSeek-V3's architecture under another name, for which `build` names code of the directory.
    "kimi_k2": lambda: transformers.DeepseekV3Config(
        **COMMON, **LATENT, n_routed_experts=8, n_group=1, topk_group=1, routed_scaling_factor=2.5,
        topk_method="noaux_tc", scoring_func="sigmoid",
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_local_experts=8, intermediate_size=48,
    ),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(  # GLM-5
        **COMMON, **LATENT, n_routed_experts=8, n_group=1, topk_group=1, index_topk=8, index_head_dim=16,
        index_n_heads=2,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, num_experts=8, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **without_top_k(), num_hidden_layers=3, num_key_value_heads=2, moe_num_experts=8,
        moe_k=2, moe_intermediate_size=32, intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1,
        moe_layer_end_index=2, moe_layer_interval=1,
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=8, intermediate_size=48,
        sliding_window=None,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=8, intermediate_size=48,
        residual_multiplier=0.5,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_experts=8, moe_intermediate_size=32,
        intermediate_size=64, shared_expert_intermediate_size=48,
    ),
}  # fmt: skip


# Families that semmoe's table of engines does not name.
UNTRIED = {
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=8, intermediate_size=48,
        shared_intermediate_size=32,
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_experts=8, intermediate_size=64,
        moe_intermediate_size=32, num_dense_layers=1, layer_types=["full_attention"] * 3,
    ),
    "flex_olmo": lambda: transformers.FlexOlmoConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, num_experts=8, intermediate_size=48,
    ),
    "afmoe": lambda: transformers.AfmoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=8, num_local_experts=8,
        num_shared_experts=1, moe_intermediate_size=32, intermediate_size=64, num_dense_layers=1,
    ),
    "exaone_moe": lambda: transformers.ExaoneMoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=8, num_shared_experts=1,
        moe_intermediate_size=32, intermediate_size=64, first_k_dense_replace=1, n_group=1, topk_group=1,
        layer_types=["full_attention"] * 3,
    ),
    "cohere2_moe": lambda: transformers.Cohere2MoeConfig(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=8, intermediate_size=48,
    ),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeTextConfig(
        **COMMON, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, num_experts=8, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **without_top_k(), num_experts_per_tok=1, num_hidden_layers=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=8, intermediate_size=32, intermediate_size_mlp=64, interleave_moe_layer_step=2,
    ),
}  # fmt: skip


# Tokens of a model with images, after those of the shipped tokenizer.
IMAGE_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
                "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
# Families saved with a tensor per expert.
SPLIT = {"llama4_text"}


def build(architecture: str, folder: Path, **changes: object) -> str:
    """A checkpoint of `architecture` under `folder`, its configuration changed; returns its path."""
    path = folder / architecture
    if not path.exists():
        torch.manual_seed(0)
        config = (CONFIGS | UNTRIED)[architecture]()
        for name, value in changes.items():
            setattr(config, name, value)
        model = transformers.AutoModelForCausalLM.from_config(config)
        fill_tables(model)
        fill_routers(model)
        model.save_pretrained(path)
        load_tokenizer(str(MODEL)).save_pretrained(path)
        if architecture in SPLIT:
            split_experts(path)
        config_file = path / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | STATED.get(architecture, {})))
        if "auto_map" in STATED.get(architecture, {}):
            (path / "own.py").write_text("raise SystemExit('code of the directory was run')")
    return str(path)


def build_with_images(folder: Path) -> str:
    """A checkpoint of Qwen3-VL-MoE under `folder`, with its processor of images; returns its path."""
    path, tokenizer = folder / "qwen3_vl_moe", load_tokenizer(str(MODEL))
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS.values())})
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in IMAGE_TOKENS.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = COMMON | {"vocab_size": 4160, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32,
                     "num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True,
                     "rope_parameters": rope}  # fmt: skip
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16,
              "initializer_range": 0.25}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    transpose_experts(path)
    images = transformers.Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 1024, "longest_edge": 4096})
    videos = transformers.Qwen3VLVideoProcessor(patch_size=16)
    transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template="{{ messages }}").save_pretrained(path)
    return str(path)


def transpose_experts(path: Path) -> None:
    """Turn the tensors of a layer's experts from (E, out, in) to (E, in, out), as Qwen3-VL-MoE is published."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if ".experts." in name:
            tensors[name] = weight.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def split_experts(path: Path) -> None:
    """Split the tensors that hold all experts of a layer, (E, in, out), into three per expert."""
    file, parts = path / "model.safetensors", {}
    for name, weight in load_file(file).items():
        head, _, kind = name.rpartition(".experts.")
        stacked = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        for part, experts in zip(stacked, weight.chunk(max(len(stacked), 1), dim=-1), strict=False):
            for expert, one in enumerate(experts):
                parts[f"{head}.experts.{expert}.{part}.weight"] = one.T.contiguous()
        if not stacked:
            parts[name] = weight
    save_file(parts, file, metadata={"format": "pt"})


def fill_tables(model: torch.nn.Module) -> None:
    """Random distinct experts in the tables of hash-routed layers, which a new model has all zero."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            experts = int(model.config.n_routed_experts)
            table.copy_(torch.rand(len(table), experts).argsort(dim=1)[:, : table.shape[1]])


def fill_routers(model: torch.nn.Module) -> None:
    """Random weights in routers that a new model has all zero, as ERNIE's: all tokens would choose the same experts."""
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight") and not weight.any():
            torch.nn.init.normal_(weight, std=model.config.initializer_range)
