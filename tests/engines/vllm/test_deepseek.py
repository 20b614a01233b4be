"""Tokens shuffled in DeepSeek-V2's decoder layers, whose attention vLLM reduce-scatters itself.

Held against vLLM without a plan on the same ranks: with latent attention on a CPU it agrees neither with itself on one
rank nor with transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from models import COMMON, LATENT
from serving import free_port

from semmoe.core import Topology
from semmoe.demo import MODEL
from semmoe.engines.transformers import recorder
from semmoe.engines.transformers.model import load_model, load_tokenizer
from semmoe.engines.vllm.launch import CPU_VARIABLES
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solve import solve

# The widths that vLLM's latent attention takes.
WIDTHS = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
EASY = CoclusterSettings(starts=1, kicks=1, sweeps=2)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    groups = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV2Config(**COMMON, **(LATENT | WIDTHS), **groups, n_routed_experts=8)
    transformers.set_seed(0)
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(str(MODEL)).save_pretrained(folder)
    return folder


def on_two_ranks(model: Path, prompts: Path, out: Path, variables: dict[str, str]) -> list[list[int]]:
    """What rank 0 generated, which must be what rank 1 did."""
    shared = os.environ | CPU_VARIABLES | variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "rank.py"), str(model), str(prompts)]
    outs = [out.with_suffix(f".{rank}.json") for rank in (0, 1)]
    ranks = [
        subprocess.Popen(
            [*words, str(outs[r])], env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for r in (0, 1)
    ]  # fmt: skip
    logs = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], logs[0][-3000:]
    mine, theirs = (json.loads(path.read_text()) for path in outs)
    assert mine == theirs
    return mine


def test_a_plan_changes_no_token(deepseek, texts, prompts, tmp_path):
    trace = recorder.record(load_model(str(deepseek)), str(deepseek), texts[32:64], tmp_path / "trace")
    save_plan(solve(trace, Topology(ep_size=2), SolveSettings(redundant_experts=2, cocluster=EASY)), tmp_path / "plan")
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    given = deepseek, tmp_path / "prompts.json"
    vanilla = on_two_ranks(*given, tmp_path / "vanilla", {"SEMMOE_CONTROL": str(tmp_path / "a")})
    planned = {"SEMMOE_CONTROL": str(tmp_path / "b"), "SEMMOE_PLAN": str(tmp_path / "plan")}
    assert on_two_ranks(*given, tmp_path / "planned", planned) == vanilla
    counted = json.loads((tmp_path / "b" / "activity-rank-00000.json").read_text())["samples"]
    assert sum(sample["value"] for sample in counted if sample["name"] == "remote_rows") > 0
