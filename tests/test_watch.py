"""`semmoe watch` on pages of Prometheus' own library, served over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from ports import free_port
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.serve import _publish
from semmoe.live import watch


class Site:
    """A server whose counters a test moves."""

    def __init__(self):
        self.registry, self.moves = CollectorRegistry(), []
        self._metrics = {}
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                for move in site.moves:
                    move()
                page = generate_latest(site.registry)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name, amount, **labels):
        kind = Gauge if name in watch.GAUGES else Counter
        if name not in self._metrics:
            self._metrics[name] = kind(f"semmoe_{name}", name, list(labels), registry=self.registry)
        (self._metrics[name].labels(**labels) if labels else self._metrics[name]).inc(amount)

    def serve(self, local, remote, tier="node"):
        """Two ranks route so many pairs at home and away."""
        for rank, other in (("0", "1"), ("1", "0")):
            self.add("pairs", local, ep_rank=rank, local="true")
            self.add("pairs", remote, ep_rank=rank, local="false")
            self.add("routed_tokens", (local + remote) / 4, ep_rank=rank)
            self.add("served_pairs", local, by=rank)
            self.add("served_pairs", remote, by=other)
            self.add("remote_rows", remote / 2, ep_rank=rank, tier=tier)
            self.add("scheduled_requests", 3, dp_rank=rank, by="plan")


@pytest.fixture
def site():
    made = Site()
    made.add("active", 2, engine="sglang", method="semmoe")
    yield made
    made.server.shutdown()


@pytest.fixture
def plan(tmp_path):
    """A plan that expects three quarters of the pairs at home."""
    from dataclasses import replace

    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import save_plan
    from semmoe.topology import Fingerprint, Topology

    fingerprint = Fingerprint(
        model="m", architecture_hash="a", tokenizer_hash="t", vocab_size=64, num_layers=2, num_experts=8, top_k=4,
        num_groups=1, hidden_size=16, expert_size=8,
    )  # fmt: skip
    made = vanilla_plan(fingerprint, Topology(ep_size=2, dp_size=2))
    save_plan(replace(made, expected={"lar": 0.75}), tmp_path / "plan")
    return str(tmp_path / "plan")


def run(*words):
    return CliRunner().invoke(app, ["watch", *words, "--window", "0.2", "--every", "0.1", "--once"])


def test_figures_are_of_the_window(site):
    site.serve(1_000_000, 0)  # before anyone looked
    before = watch.look([site.url], 10.0)
    site.serve(30_000, 10_000)
    seen = watch.view(before, watch.look([site.url], 12.0))
    assert (seen.lar, seen.pairs, seen.ranks, seen.seconds) == (0.75, 80_000, 2, 2.0)
    assert seen.routed_tokens_per_second == 10_000
    assert (seen.remote_ranks_per_token, seen.network_ranks_per_token, seen.remote_pairs_per_token) == (0.5, 0.0, 1.0)
    assert (seen.remote_nodes_per_token, seen.node_pairs) == (None, [])
    assert seen.load == {"0": 1.0, "1": 1.0}
    assert seen.scheduled == {"0": 3, "1": 3}
    assert seen.all_to_all_bytes_per_token is None


def test_a_server_that_was_restarted_is_seen_from_its_start(site):
    site.serve(100, 100)
    before = watch.look([site.url], 0.0)
    again = Site()
    again.add("active", 2, engine="sglang", method="semmoe")
    again.serve(30, 10)
    assert watch.view(before, watch.look([again.url], 1.0)).lar == 0.75


def test_drift_is_told_by_its_margin_and_only_of_enough(site, plan):
    site.moves = [lambda: site.serve(7_000, 3_000)]
    result = run(site.url, "--plan", plan, "--margin", "0.04")
    assert result.exit_code == 1, result.output
    assert "DRIFT: local activation rate 0.700, the plan expects 0.750" in result.output
    held = run(site.url, "--plan", plan, "--margin", "0.06")
    assert (held.exit_code, "DRIFT" in held.output) == (0, False)
    site.moves = [lambda: site.serve(70, 30)]
    assert run(site.url, "--plan", plan, "--margin", "0.04").exit_code == 0


def test_what_people_and_machines_see(site, plan):
    site.moves = [lambda: site.serve(9_000, 1_000)]
    said = run(site.url, "--plan", plan).output
    for words in ("2 ranks, engine sglang, method semmoe", r"local activation rate +0\.900 +the plan expects 0\.750",
                  r"requests by the plan +6 +3 to rank 0, 3 to rank 1", "█"):  # fmt: skip
        assert re.search(words, said), said
    found = json.loads(run(site.url, "--plan", plan, "--json").output)
    assert (found["lar"], found["expected_lar"], found["drift"]) == (0.9, 0.75, None)
    still = Site()
    still.add("active", 1, engine="vllm", method="semmoe")
    assert "no tokens were routed" in run(still.url).output


def test_traffic_by_pair_of_nodes(site):
    """Two ranks on two nodes: 10,000 rows one way, twice as many the other; bytes if semmoe sends them."""

    def serve(sent):
        site.serve(30_000, 10_000, tier="network")
        for source, target, rows in (("0", "1", 10_000), ("1", "0", 20_000)):
            site.add("node_rows", rows, node=source, to_node=target)
            if sent:
                site.add("all_to_all_bytes", 768 * rows, ep_rank=source, tier="network")
                site.add("node_bytes", 768 * rows, node=source, to_node=target)

    serve(sent=False)
    looks = [watch.look([site.url], 0.0)]
    for time, sent in ((2.0, False), (4.0, True), (6.0, True)):
        serve(sent)
        looks.append(watch.look([site.url], time))
    plain, _, full = (watch.view(*both) for both in pairwise(looks))
    assert (plain.network_ranks_per_token, plain.remote_nodes_per_token) == (0.5, 1.5)
    ends = [(pair.source, pair.target, pair.rows_per_second, pair.bytes_per_second) for pair in plain.node_pairs]
    assert ends == [("1", "0", 10_000, None), ("0", "1", 5_000, None)]
    assert [pair.bytes_per_second for pair in full.node_pairs] == [7_680_000, 3_840_000]


def test_pairs_as_people_see_them(site):
    """The heaviest of many pairs, in a table."""

    def serve():
        site.serve(9_000, 1_000, tier="network")
        for i, j in permutations(range(5), 2):
            site.add("node_rows", 100 * i + j, node=i, to_node=j)
            site.add("node_bytes", 10**6 * i, node=i, to_node=j)

    site.moves = [serve]
    said = run(site.url).output
    for words in (r"remote ranks per token +0\.20 +and layer, 0\.20 on other nodes", r"remote nodes per token +0\.\d\d",
                  r"remote pairs per token +0\.40 +and layer", r"node 4 → 3 .* rows a second, \d+\.\d\d MB",
                  r"4 → 3 .*\nnode 4 → 2 .*\nnode 4 → 1 ",
                  "the 12 heaviest of 20 pairs"):  # fmt: skip
        assert re.search(words, said), said
    assert "1 → 0" not in said
    found = json.loads(run(site.url, "--json").output)
    assert len(found["node_pairs"]) == 20
    assert set(found["node_pairs"][0]) == {"source", "target", "rows_per_second", "bytes_per_second"}


def test_a_machine_reads_a_line_of_json_each_time_until_it_stops_watching(site):
    site.serve(9_000, 1_000)
    words = [Path(sys.executable).with_name("semmoe"), "watch", site.url, "--every", "0.1", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.send_signal(signal.SIGINT)
    assert all("lar" in json.loads(line) for line in lines)


def test_mistakes_are_named(site):
    for words, line in (
        (["ftp://x"], "is not the address of a server"), (["http://127.0.0.1:9"], "gives no metrics"),
        ([f"{site.url}/other"], "gives no metrics"), ([site.url, "--every", "0"], "Invalid value for '--every'"),
    ):  # fmt: skip
        result = run(*words) if "--every" not in words else CliRunner().invoke(app, ["watch", *words])
        assert result.exit_code == 2
        assert line in result.output
    bare = Site()
    bare.add("other", 1)
    assert "none of semmoe's" in run(bare.url).output


def test_counters_that_stand_still_are_told_from_a_server_without_requests(site):
    """Two processes publish, then one of them no more."""
    for process in ("rank-00000", "frontend"):
        site.add("publications", 1, process=process)
    before = watch.look([site.url], 0.0)
    for process in ("rank-00000", "frontend"):
        site.add("publications", 9, process=process)
    after = watch.look([site.url], 10.0)
    assert watch.view(before, after).stale == []
    site.add("publications", 9, process="frontend")
    later = watch.look([site.url], 20.0)
    assert watch.view(after, later).stale == ["rank-00000"]
    assert watch.view(after, watch.Look(10.5, later.totals)).stale == []  # too soon to say


def test_a_server_whose_hooks_do_not_run_is_told(site):
    site.moves = [lambda: site.serve(9_000, 1_000)]
    assert run(site.url).exit_code == 0
    site.add("degraded", 2, reason="routed 0 of 6 times")
    result = run(site.url)
    assert (result.exit_code, "DEGRADED: routed 0 of 6 times" in result.output) == (1, True)
    found = json.loads(run(site.url, "--json").output)
    assert (found["degraded"], found["lar"]) == (["routed 0 of 6 times"], 0.9)


def test_nodes_are_added_up(site):
    """A node publishes what its own ranks count."""
    other = Site()
    try:
        other.add("active", 2, engine="sglang", method="semmoe")
        for node in (site, other):
            node.serve(1, 1)  # counters exist before the window
        moves = {site: lambda: site.serve(30_000, 10_000), other: lambda: other.serve(10_000, 30_000)}
        for node, move in moves.items():
            node.moves.append(move)
        seen = json.loads(run(site.url, "--also", other.url, "--json").stdout)
        assert (seen["ranks"], seen["lar"]) == (4, 0.5)
        alone = json.loads(run(site.url, "--json").stdout)
        assert (alone["ranks"], alone["lar"]) == (2, 0.75)
    finally:
        other.server.shutdown()


def test_a_node_without_a_front_end_publishes_its_counters(tmp_path):
    """vLLM's `--headless` node has no /metrics of its own; its ranks write where `semmoe serve` reads."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    count = (
        "from prometheus_client import Counter; Counter('semmoe_routed_tokens', 'd', ['ep_rank']).labels('1').inc(7)"
    )
    subprocess.run(
        [sys.executable, "-c", count], env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}, check=True
    )
    port = free_port()
    _publish(tmp_path, "127.0.0.1", port, ["--headless"])
    assert 'semmoe_routed_tokens_total{ep_rank="1"} 7.0' in watch.fetch(f"http://127.0.0.1:{port}")
    with pytest.raises(ValueError, match="give another --port"):
        _publish(tmp_path, "127.0.0.1", port, ["--headless"])
    _publish(tmp_path, "127.0.0.1", port, [])  # a node with a front end, which publishes them itself
