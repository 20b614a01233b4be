"""Counters: totals here, differences to Prometheus, all of them to a file."""

import subprocess
import sys

import torch

from semmoe.costs.metrics import layer_traffic
from semmoe.engines.counters import Activity, Counters
from semmoe.runtime.traffic import TrafficCounter


def test_counted_and_read(tmp_path):
    counters, total = Counters("rank-00000", tmp_path), [5.0]
    counters.sources.append(lambda: iter([("routed_tokens", {"ep_rank": "0"}, total[0])]))
    counters.add("scheduled_requests", dp_rank=1, by="plan")
    counters.add("scheduled_requests", dp_rank=1, by="plan")
    counters.publish()
    said = Activity.model_validate_json((tmp_path / "activity-rank-00000.json").read_bytes())
    found = {(s.name, *sorted(s.labels.items())): s.value for s in said.samples}
    assert found == {
        ("scheduled_requests", ("by", "plan"), ("dp_rank", "1")): 2.0,
        ("routed_tokens", ("ep_rank", "0")): 5.0,
    }


PROMETHEUS = """
import os, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from semmoe.engines.counters import Counters

counters, total = Counters("x"), [5.0]
counters.sources.append(lambda: iter([("routed_tokens", {"ep_rank": "0"}, total[0])]))
counters.add("active", 1, engine="e")
counters.sources.append(lambda: iter([("degraded", {"reason": "r"}, 1.0)]))
counters.publish()
total[0] = 7.0
counters.publish()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_prometheus_gets_differences(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    said = subprocess.run([sys.executable, "-c", PROMETHEUS], capture_output=True, text=True, check=True).stdout
    assert 'semmoe_routed_tokens_total{ep_rank="0"} 7.0' in said
    assert 'semmoe_active{engine="e"} 1.0' in said
    assert 'semmoe_degraded{reason="r"} 1.0' in said  # of now, not a sum over publications


def test_traffic_is_that_of_the_replay():
    """Rank 1 of 4: rows once to each other rank, padding nowhere; as `metrics.layer_traffic` counts."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (50, 3), generator=generator)
    counter = TrafficCounter(4, 1)
    counter.count(targets[:20])
    counter.count(torch.cat([targets[20:], torch.full((5, 3), -1)]))
    counter.count(torch.empty((0, 3), dtype=torch.int32))
    tokens, pairs, rows, _ = counter.totals()
    expected = layer_traffic(targets.numpy(), torch.ones(50, dtype=torch.int64).numpy(), 4)
    assert (tokens, pairs, rows) == (50, expected.load.tolist(), expected.rows[1].tolist())


def test_counters_outlive_a_disk_without_room(tmp_path):
    counters = Counters("rank-00000", tmp_path / "absent" / "folder")
    (tmp_path / "absent").write_text("a file in the way")
    assert "NotADirectoryError" in counters.try_to_publish() or "FileExistsError" in counters.try_to_publish()
    (tmp_path / "absent").unlink()
    assert counters.try_to_publish() == ""
    path = tmp_path / "absent" / "folder" / "activity-rank-00000.json"
    said = Activity.model_validate_json(path.read_bytes())
    assert [(s.name, s.value > 1) for s in said.samples] == [("publications", True)]


SERVED = """
import os, sys, tempfile
os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from semmoe.live import watch
from semmoe.engines.counters import Counters

plans, done = [0xABC], [0]
counters = Counters("rank-00000")
counters.sources.append(lambda: iter([("plan_number", {"ep_rank": "0"}, plans[0])]))
counters.sources.append(lambda: iter([("swaps", {"ep_rank": "0", "outcome": "done"}, done[0])]))
labels = {"engine": "sglang 1", "method": "vanilla", "attention": "dp", "shuffle": "no", "redundant": "0"}
counters.add("active", 1, plan="first", **labels)
for number in (0xABC, 0xDEF):
    plans[0], done[0] = number, int(number == 0xDEF)
    counters.publish()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    look = watch.parse({"a page": generate_latest(registry).decode()}, 0.0)
    print(*(f"{name}={value}" for name, value in watch.view(look, look).active.items()), sep=";")
"""


def test_the_plan_that_is_watched_is_the_one_that_is_served():
    """By its own name, which changes with a swap; the folder and the method of the first plan are not shown then."""
    said = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, check=True).stdout
    first, second = said.splitlines()
    assert "plan=000000000abc" in first.split(";")
    assert "method=vanilla" in first.split(";")
    assert "plan=000000000def" in second.split(";")
    assert "first" not in second
    assert "method" not in second
