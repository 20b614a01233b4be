"""What the all-to-all carries on held-out prompts: DeepSpeed as it is, and on a plan; real bytes too."""

import pytest
from test_autoep import SETTINGS, TOPOLOGIES, topology

from lab.deepspeed import set_up
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.generate import generate
from semmoe.engines.transformers.recorder import record
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import SolveSettings
from semmoe.solver import solve

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", ["TP4/EP4"])
def test_at_least_thirty_percent_fewer_rows(model, texts, tmp_path, name):
    trace = record(model, str(MODEL), texts[32:], tmp_path / "trace")
    alike = [text[:64] for text in texts[:32] if len(text) >= 64]  # no padding, which vanilla would send
    vanilla, plan = vanilla_plan(trace.fingerprint, topology(name)), solve(trace, topology(name), SolveSettings())
    ups = [set_up("vanilla", vanilla, "off"), set_up("plan", plan, "predicted")]
    before, after = generate(str(MODEL), alike, ups, SETTINGS)
    pairs = after.forward_tokens * trace.fingerprint.top_k * trace.fingerprint.num_layers
    row = trace.fingerprint.hidden_size * 4
    assert after.all_to_all_bytes == 2 * row * round(pairs * (1 - after.lar))
    assert 1 - after.lar < 0.7 * (1 - before.lar)  # one row per (token, expert), as DeepSpeed sends
    assert after.remote_ranks_per_token < 0.7 * before.remote_ranks_per_token  # one per destination rank
    assert after.all_to_all_bytes < 0.7 * before.all_to_all_bytes
    assert after.total_bytes < before.total_bytes
    assert TOPOLOGIES[name][0] == len(after.all_to_all_bytes_per_rank_pair)
