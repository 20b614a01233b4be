"""Profiling agrees with what the routers chose, for every supported architecture."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from models import CONFIGS, build

from semmoe.cli.demo import MODEL
from semmoe.core import DECODE, PREFILL
from semmoe.engines.transformers import model as models
from semmoe.engines.transformers.attention import shard_attention
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.recorder import record_prompts
from semmoe.engines.transformers.verify import plain_generate
from semmoe.settings import GenerateSettings
from semmoe.traces.trace import TraceHeader, TraceWriter, open_trace

PROMPTS = [[5, 9, 200, 31, 7], [8, 1000, 3], [44, 45, 46, 47, 48, 49, 50, 51], [17]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def record(path, out, **settings):
    model = models.load_model(path)
    header = TraceHeader(fingerprint=fingerprint_of(path), dataset_hash="test", settings={})
    with TraceWriter(out, header) as writer:
        record_prompts(model, PROMPTS, writer, **settings)
    return model, open_trace(out)


def router_choices(model, tokens):
    """(T, L, K) expert ids, sorted, of one unpadded sequence, taken from the routers themselves."""
    routed = []
    blocks = models.moe_layers(model)
    routers = [getattr(block, "gate", None) or block.router for block in blocks]
    hooks = [block.experts.register_forward_pre_hook(lambda m, a: routed.append(a[1])) for block in blocks]
    assert len(routers) == len(blocks)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(routed, dim=1).numpy(), axis=2)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_trace_equals_the_routing_of_unpadded_single_sequences(architecture, checkpoints, tmp_path):
    path = build(architecture, checkpoints)
    model, trace = record(path, tmp_path / "trace", batch_size=3)
    assert trace.num_requests == len(PROMPTS)
    assert trace.token_ids.tolist() == [token for prompt in PROMPTS for token in prompt]
    for r, prompt in enumerate(PROMPTS):
        rows = slice(trace.request_offsets[r], trace.request_offsets[r + 1])
        assert np.array_equal(np.sort(trace.expert_ids[rows], axis=2), router_choices(model, prompt))


def test_experts_are_stored_by_falling_weight(checkpoints, tmp_path):
    path = build("qwen3_moe", checkpoints)
    model, trace = record(path, tmp_path / "trace")
    weights = []
    hook = models.moe_layers(model)[0].gate.register_forward_hook(lambda m, a, out: weights.append(out[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPTS[0]]))
    hook.remove()
    expected = weights[0].argsort(dim=1, descending=True)[:, :2].numpy()
    assert np.array_equal(trace.expert_ids[: len(PROMPTS[0]), 0], expected)


def test_decode_records_every_token_that_is_fed_back(checkpoints, tmp_path):
    path = build("mixtral", checkpoints)
    model, trace = record(path, tmp_path / "trace", batch_size=2, max_new_tokens=6)
    outputs = plain_generate(model, PROMPTS, GenerateSettings(max_new_tokens=6))
    for r, (prompt, new) in enumerate(zip(PROMPTS, outputs, strict=True)):
        rows = slice(trace.request_offsets[r], trace.request_offsets[r + 1])
        fed = [*prompt, *new[:-1]]
        assert trace.token_ids[rows].tolist() == fed
        assert trace.phase[rows].tolist() == [PREFILL] * len(prompt) + [DECODE] * (len(fed) - len(prompt))
        assert np.array_equal(np.sort(trace.expert_ids[rows], axis=2), router_choices(model, fed))
        assert trace.prompt(r).tolist() == prompt


def test_profile_resumes_where_it_was_stopped(checkpoints, tmp_path):
    path = build("qwen3_moe", checkpoints)
    model, whole = record(path, tmp_path / "whole")
    header = TraceHeader(fingerprint=whole.fingerprint, dataset_hash="test", settings={})

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "parts", header) as writer:
        record_prompts(model, PROMPTS, writer, batch_size=2, progress=stop)
    assert open_trace(tmp_path / "parts").num_requests == 2
    with TraceWriter(tmp_path / "parts", header) as writer:
        record_prompts(model, PROMPTS, writer, batch_size=2)
    assert open_trace(tmp_path / "parts").digest() == whole.digest()


def test_fingerprint_tells_models_and_tokenizers_apart(checkpoints):
    mixtral = fingerprint_of(build("mixtral", checkpoints))
    qwen = fingerprint_of(build("qwen3_moe", checkpoints))
    with pytest.raises(ValueError, match="expert_size is 48"):  # a size says more than a hash
        mixtral.check_same(qwen, "t:")
    with pytest.raises(ValueError, match="architecture_hash"):
        replace(mixtral, architecture_hash="other").check_same(mixtral, "t:")
    assert mixtral.tokenizer_hash == qwen.tokenizer_hash
    assert fingerprint_of(build("deepseek_v2", checkpoints)).num_groups == 4
    assert fingerprint_of(build("deepseek_v2", checkpoints)).num_layers == 2


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_fingerprint_counts_the_layers_of_the_loaded_model(architecture, tmp_path):
    path = Path(build(architecture, tmp_path))
    assert fingerprint_of(str(path)).num_layers == len(models.moe_layers(models.load_model(str(path))))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"it holds pytorch_model.bin: convert the model to safetensors first"):
        fingerprint_of(str(path))


def test_a_fingerprint_imports_no_code_of_models():
    code = (
        "import sys; from semmoe.engines.transformers.config import fingerprint_of; "
        f"assert fingerprint_of({str(MODEL)!r}).num_layers == 6; "
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dense_model_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no MoE layer"):
        models.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (4, 2, 3, r"over 3 does not divide 4 attention heads \(nearest: 2 and 4\)"),
        (12, 4, 6, r"4 key heads and 6 ranks: .*\(nearest: 4 and 12\)"),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused_with_the_nearest_numbers(heads, kv_heads, size, message):
    config = transformers.Qwen3MoeConfig(
        hidden_size=24, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=2
    )
    attention = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention(config, 0)
    with pytest.raises(ValueError, match=message):
        shard_attention(attention, 0, size)
