"""Small, randomly initialised MoE models of several architectures, saved as Hugging Face checkpoints."""

from pathlib import Path

import torch
import transformers

from semmoe.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer

# Wide initial weights: router scores and logits far enough apart that a fault, not a near-tie, changes an output.
COMMON = {"vocab_size": 4096, "hidden_size": 64, "num_attention_heads": 4, "initializer_range": 0.25,
          "num_experts_per_tok": 2, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "intermediate_size": 64,
          "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_layer_freq": 1}  # fmt: skip
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
}  # fmt: skip


def build(architecture: str, folder: Path, **changes: object) -> str:
    """A checkpoint of `architecture` under `folder`, its configuration changed; returns its path."""
    path = folder / architecture
    if not path.exists():
        torch.manual_seed(0)
        config = CONFIGS[architecture]()
        for name, value in changes.items():
            setattr(config, name, value)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(path)
        load_tokenizer(str(MODEL)).save_pretrained(path)
    return str(path)
