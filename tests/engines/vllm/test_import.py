"""`semmoe import` reads what vLLM's own types write: answers with routed experts, by contract.

vLLM returns them with its second model runner alone, which needs Triton and does not start on a CPU.
"""

import numpy as np
from typer.testing import CliRunner
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.utils.serial_utils import numpy2base64

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.traces.trace import open_trace


def test_a_completion_with_routed_experts_is_read(tmp_path):
    f, rng = fingerprint_of(str(MODEL)), np.random.default_rng(0)
    routed = rng.random((4, f.num_layers, f.num_experts)).argsort(axis=2)[..., : f.top_k].astype(np.uint8)
    choice = CompletionResponseChoice(
        index=0, text="x", prompt_token_ids=[5, 6, 7], token_ids=[8, 9], routed_experts=numpy2base64(routed)
    )
    usage = UsageInfo(prompt_tokens=3, completion_tokens=2, total_tokens=5)
    answer = CompletionResponse(model="m", choices=[choice], usage=usage)
    (tmp_path / "answers.jsonl").write_text(answer.model_dump_json() + "\n")
    words = ["import", tmp_path / "answers.jsonl", "--model", MODEL, "--out", tmp_path / "trace"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == [5, 6, 7, 8]
    np.testing.assert_array_equal(trace.expert_ids, routed)
