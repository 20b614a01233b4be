"""What holds of every engine's server on a plan, in every set-up: the plain model's tokens; and what users may send."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from unittest import mock

import numpy as np
import openai
import pytest
import requests
from ports import listening
from serving import NEW_TOKENS, SEMMOE, cli, free_port
from waiting import eventually

from semmoe.cli import main
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers import verify
from semmoe.live import watch
from semmoe.live.client import Served
from semmoe.live.status import plan_number, read_statuses
from semmoe.plan import load_plan
from semmoe.settings import SwapSettings
from semmoe.traces.trace import open_trace

SWAPS, FEWER_SWAPS, CLIENTS = 50, 20, 64
SPAWNED = "dp2"  # the set-up whose processes start as the engine starts them
PAGE = Path(__file__).parents[2] / "docs" / "index.md"
SHELL = re.compile(r"^```shell\n(.*?)^```", re.M | re.S)


class ServerTests:
    """A subclass's module has a fixture `server`, of module scope, whose `name` is one of these."""

    ACTIVE = ""  # what the log says
    SCHEDULING: tuple[str, ...] = ()  # set-ups whose requests are sent to ranks
    RECORDING: tuple[str, ...] = ()  # whose routing is recorded
    COUNTED: dict[str, float] = {}  # whose traffic is counted: the least local activation rate
    RANKS: dict[str, int] = {}
    ROUTED: tuple[str, ...] = ()  # asked as by a gateway too
    KILLED: tuple[str, ...] = ()
    SWAPPED: dict[str, str] = {}  # set-ups whose plan is swapped, and for which of the plans
    NEWCOMERS: tuple[str, ...] = ()  # on which the page of a first afternoon is tried
    PREEMPTED: tuple[str, ...] = ()  # which preempt requests again and again, whatever else is tested

    def test_the_plain_models_tokens(self, server, model, prompts, reference):
        check(model, prompts, reference, server.complete(prompts))
        again = server.send_all(prompts)  # now from the prefix cache
        check(model, prompts, reference, [server.tokens(answer) for answer in again])
        again += [server.send(prompts[2]) for _ in range(2)]  # a small cache has kept no prefix so far
        assert sum(server.cached(answer) for answer in again) > 0

    def test_openai_clients_get_the_same(self, server, prompts, reference):
        check_openai(server.url, server.model, prompts, reference)

    def test_a_request_that_names_its_rank_keeps_it(self, server, prompts, reference):
        if server.name not in self.SCHEDULING:
            pytest.skip("one data-parallel rank")
        for rank in (0, 1):
            assert server.tokens(server.send(prompts[5], rank=rank)) == reference[5]

    def test_activity_is_proven(self, server):
        assert server.log.count(f"semmoe: active: engine {self.ACTIVE}") == 1
        found = server.counters()
        seen = watch.view(watch.Look(0.0, {}), watch.look([server.url], 1.0))
        assert (seen.ranks, seen.active["engine"]) == (found["active"], self.ACTIVE)
        assert seen.degraded == []
        assert found["active"] == self.RANKS.get(server.name, 2)
        if server.name in self.SCHEDULING:
            assert found["scheduled_requests plan"] >= 64
            assert found["scheduled_requests named"] == 2
            assert found.get("schedule_failures", 0) == 0
        if server.name in self.COUNTED:
            pairs = found["pairs true"] + found["pairs false"]
            assert pairs == 4 * found["routed_tokens"]
            assert found["pairs true"] / pairs > self.COUNTED[server.name]
            assert seen.lar == found["pairs true"] / pairs
            rows, dispatch, combine = found["remote_rows"], 192 * 4 + 4 * (4 + 4), 192 * 4
            assert found["all_to_all_bytes"] == rows * (dispatch + combine)

    def test_traffic_is_published_by_pair_of_nodes(self, server):
        """The plan of four ranks has two nodes."""
        if server.name not in self.COUNTED:
            pytest.skip("no traffic is counted")
        found = server.counters()
        seen = watch.view(watch.Look(0.0, {}), watch.look([server.url], 1.0))
        ranks = self.RANKS.get(server.name, 2)
        assert len(seen.node_pairs) == (2 if ranks == 4 else 0)
        assert seen.load.keys() == {str(rank) for rank in range(ranks)}
        if ranks == 4:
            between = seen.network_ranks_per_token * found["routed_tokens"]
            assert 0 < found["node_rows"] <= between <= 2 * found["node_rows"]
            assert found["node_rows"] == pytest.approx(sum(pair.rows_per_second for pair in seen.node_pairs))
            assert found["node_bytes"] == pytest.approx(sum(pair.bytes_per_second for pair in seen.node_pairs))

    def test_malformed_requests_do_no_harm(self, server, prompts, reference):
        answers = [requests.post(server.send(prompts[4]).url, data="{not json", timeout=30)]
        answers += [server.send(ids) for ids in ([5, 4095, 4096, 1_000_000, 7], [5, -1, 7], [])]
        answers.append(server.send(prompts[4], new_tokens=-3))
        for answer in answers:
            assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:200])
        assert server.tokens(server.send(prompts[6])) == reference[6]

    def test_a_client_that_hangs_up_does_no_harm(self, server, prompts, reference):
        with server.send(prompts[2], new_tokens=200, stream=True) as answer:
            next(answer.iter_lines())
        assert server.tokens(server.send(prompts[6])) == reference[6]

    def test_recorded_routing_is_the_plain_models(self, server, model, texts, tmp_path, capsys):
        """Every token once: prompts in chunks, a prefix that two requests share, tokens that were decoded."""
        if server.name not in self.RECORDING:
            pytest.skip("as of another set-up")
        given = [text[:90] for text in texts[100:112]]
        given.append(given[0][:60] + given[1][:40])
        cli("record", "start", str(server.control))
        time.sleep(0.5)
        answers = [server.tokens(server.send(given[0])), *server.complete(given[1:])]
        cli("record", "stop", str(server.control), "--out", str(tmp_path / "trace"))
        recorded = open_trace(tmp_path / "trace")
        expected = {tuple(p): plain_routing(model, p, a) for p, a in zip(given, answers, strict=True)}
        assert recorded.num_requests == len(given)
        for r in range(recorded.num_requests):
            rows = slice(recorded.request_offsets[r], recorded.request_offsets[r + 1])
            tokens, routed = expected[tuple(recorded.prompt(r).tolist())]
            cached = len(tokens) - len(recorded.token_ids[rows])
            assert 0 <= cached <= 64
            np.testing.assert_array_equal(recorded.token_ids[rows], tokens[cached:])
            np.testing.assert_array_equal(recorded.expert_ids[rows], routed[cached:])

    def test_a_gateway_names_ranks_in_a_header(self, server, prompts, reference):
        """As Envoy does with `semmoe picker`: six requests for each of two ranks."""
        if server.name not in self.ROUTED:
            pytest.skip("one data-parallel rank, or as of another set-up")
        before = server.counters()
        for rank in ("0", "1"):
            check_openai(server.url, server.model, prompts, reference, {"X-data-parallel-rank": rank})
        assert server.counters()["scheduled_requests named"] == before.get("scheduled_requests named", 0) + 12

    def test_swaps_under_load_lose_nothing(self, server, model, prompts, reference, plans, swap_plans):
        """64 clients stream while the plan is swapped again and again, and at last back to the first.

        More often in attention-DP, where plans of requests are swapped with those of experts.
        """
        if server.name not in self.SWAPPED:
            pytest.skip("as of another set-up")
        others, first = swap_plans[self.SWAPPED[server.name]], plans[self.SWAPPED[server.name]]
        swaps = SWAPS if server.name == "dp2" else FEWER_SWAPS
        order = np.random.default_rng(5).integers(0, len(others), swaps).tolist()
        with Clients(server, prompts) as clients:
            for turn, place in enumerate(order):
                swap(server, others[place], layers=turn % 4)
            check_one_at_a_time(server, others)
        told = json.loads(swap_command(server, first))
        assert {rank["state"] for rank in told["ranks"]} == {"done"}
        clients.check(model, reference)
        check(model, prompts, reference, server.complete(prompts))
        found, ranks = server.counters(), self.RANKS.get(server.name, 2)
        assert found["swaps"] >= ranks * len(set(order))
        assert found["plan_number"] == ranks * plan_number(load_plan(first))
        assert found["swapped_bytes"] > 0
        if server.name in self.SCHEDULING:
            assert found["request_plan_number"] == plan_number(load_plan(first))

    def test_a_plan_that_does_not_fit_is_refused_and_the_old_one_serves_on(
        self, server, model, prompts, reference, swap_plans, capsys
    ):
        if server.name not in self.SWAPPED:
            pytest.skip("as of another set-up")
        before, lines = server.counters()["plan_number"], {"topology": "and the server was started for"}
        if server.name == "dp2":
            lines["copies"] = "the plan has 0 redundant experts, and the server was started with 4"
        for name, line in lines.items():
            assert line in refused_swap(server, swap_plans[name][0], capsys)
        assert server.counters()["plan_number"] == before
        check(model, prompts, reference, server.complete(prompts))

    def test_a_first_afternoon_goes_as_its_page_says(self, server, model, prompts, reference, tmp_path):
        """What the page does with a server, on this one, whose plan has other copies than the page's."""
        if server.name not in self.NEWCOMERS:
            pytest.skip("as of another set-up")
        copies = load_plan(server.plan).placement.redundant_experts
        told = {"first/plan": server.plan, "http://127.0.0.1:8000": server.url, "control": str(server.control)}
        lines = [line for block in SHELL.findall(PAGE.read_text()) for line in block.splitlines()]
        commands = [shlex.split(line)[1:] for line in lines if line.startswith("semmoe ") and " serve " not in line]
        said = {}
        for command in commands:
            given = [told.get(word, word) for word in command]
            given += ["--redundant-experts", str(copies)] if command[0] == "solve" else []
            with Clients(server, prompts, 4) if command[0] in ("watch", "swap") else nullcontext():
                done = subprocess.run(
                    [sys.executable, *SEMMOE, *given], cwd=tmp_path, capture_output=True, text=True, timeout=200
                )
            assert done.returncode == 0, (command, done.stderr)
            said[" ".join(command[:2])] = done.stdout
            if command[:2] == ["record", "start"]:
                time.sleep(0.5)
                check(model, prompts, reference, server.complete(prompts))
        assert "local activation rate" in said["watch http://127.0.0.1:8000"]
        assert len(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"]) == 6
        assert server.counters()["plan_number"] == 2 * plan_number(load_plan(tmp_path / "next"))
        check(model, prompts, reference, server.complete(prompts))

    @pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
    def test_the_dashboard_has_the_live_rate_from_a_real_prometheus(self, server, prompts, tmp_path):
        if server.name not in self.NEWCOMERS:
            pytest.skip("as of another set-up")
        panels = json.loads(files("semmoe").joinpath("grafana/dashboard.json").read_text())["panels"]
        before = server.counters()
        with prometheus(server.url, tmp_path) as ask, Clients(server, prompts, 4):
            eventually(lambda: ask("rate(semmoe_pairs_total[20s])"), 60, 1, "a rate")
            found = {panel["title"]: [ask(target["expr"]) for target in panel["targets"]] for panel in panels}
        after = server.counters()
        moved = {kind: after[f"pairs {kind}"] - before[f"pairs {kind}"] for kind in ("true", "false")}
        ((rate,), (expected,)) = found["Local activation rate"]
        assert rate == pytest.approx(moved["true"] / sum(moved.values()), abs=0.05)
        assert expected == 0.5
        assert found["Ranks on which the plug-in runs"] == [[after["active"]]]
        assert len(found["Expert load by rank, of the mean"][0]) == after["active"]

    def test_requests_were_preempted(self, server):
        if server.name not in self.PREEMPTED:
            pytest.skip("as of another set-up")
        assert server.preemptions() > 10

    def test_the_death_of_a_rank_ends_the_server(self, server, prompts):
        """The last test of each server: every client gets an answer or an error, and no process stays."""
        if server.name not in self.KILLED:
            pytest.skip("as of another set-up")
        ranks = server.ranks()
        assert len(ranks) == 2
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.send, prompts[2], new_tokens=1500, endless=True)
            time.sleep(1)
            os.kill(ranks[1], signal.SIGKILL)
            error = waiting.exception(timeout=100)
        answer = None if error else waiting.result()  # vLLM may answer with what it had, and say that it stopped
        assert answer is None or answer.status_code >= 400 or server.reason(answer) == "abort", answer.text[-500:]
        server.process.wait(timeout=60)  # vLLM's exit code is 0 even so
        assert server.ranks() == []


def started(kind, set_ups, costly=()):
    """The fixture `server` of a module: one after another, servers of that kind in every set-up, by its name.

    set_ups: options of `semmoe serve`, in which a plan goes by its name, the engine's own, and variables. costly: names
    of those whose tests a slow machine leaves out, as it does those on four ranks.
    """

    def named(name):
        return pytest.param(name, marks=[pytest.mark.costly] * (name in costly or "hybrid" in set_ups[name][0]))

    @pytest.fixture(scope="module", params=map(named, set_ups))
    def server(request, plans, tmp_path_factory):
        options, engine, *variables = set_ups[request.param]
        words = [plans.get(word, word) for word in options]
        folder, forks = tmp_path_factory.mktemp("server"), request.param != SPAWNED
        made = kind(folder, str(MODEL), *words, engine=engine, forks=forks, variables=dict(*variables))
        made.name, made.plan = request.param, plans.get(request.param)
        try:
            yield made.wait()
        finally:
            made.stop()

    return server


@contextmanager
def prometheus(url, folder):
    """A Prometheus that reads a server every other second; yields what it answers to a dashboard's query, as floats."""
    target = {"targets": [url.removeprefix("http://")]}
    scrape = {"job_name": "semmoe", "scrape_interval": "2s", "static_configs": [target]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    port = free_port()
    address = f"127.0.0.1:{port}"
    words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/series"]
    variables = {"$job": ".*", "$__rate_interval": "20s", "$expected_lar": "0.5"}

    def ask(query):
        for name, value in variables.items():
            query = query.replace(name, value)
        answer = requests.get(f"http://{address}/api/v1/query", {"query": query}, timeout=10).json()
        assert answer["status"] == "success", (query, answer)
        return [float(one["value"][1]) for one in answer["data"]["result"]]

    with listening(port, *words, f"--web.listen-address={address}"):
        ready = f"http://{address}/-/ready"  # until it has replayed its own log it answers 503
        eventually(lambda: requests.get(ready, timeout=10).ok, 60, 0.1, ready)
        yield ask


class Clients:
    """Clients that each send one request after the other, streaming, until the block ends."""

    def __init__(self, server, prompts, count=CLIENTS):
        self._server, self._prompts, self._count = server, prompts, count
        self._stop, self._answers = threading.Event(), []

    def __enter__(self):
        self._pool = ThreadPoolExecutor(self._count)
        self._running = [self._pool.submit(self._send, i) for i in range(self._count)]
        return self

    def _send(self, first):
        for turn in itertools.count():
            if self._stop.is_set():
                return
            i = (first + turn) % len(self._prompts)
            with self._server.send(self._prompts[i], stream=True) as answer:
                self._answers.append((i, self._server.streamed(answer)))

    def __exit__(self, *error):
        self._stop.set()
        self._failures = [one.exception(timeout=120) for one in self._running]
        self._pool.shutdown()

    def check(self, model, reference):
        """Every answer is the plain model's, token for token but for near-ties, which single prompts have."""
        assert not any(self._failures), self._failures
        assert len(self._answers) >= 2 * self._count
        parted = sorted({i for i, tokens in self._answers if tokens != reference[i]})
        wrong = [next(tokens for j, tokens in self._answers if j == i and tokens != reference[i]) for i in parted]
        prompts, expected = [self._prompts[i] for i in parted], [reference[i] for i in parted]
        assert len(parted) <= 1, parted
        assert not parted or verify.compare_outputs(model, prompts, expected, wrong).holds, (parted, wrong)


def swap(server, plan, layers=0):
    """What rank 0 says at the end; every rank of this node says the same."""
    settings = SwapSettings(layers_per_pass=layers)
    status = Served(server.url, server.control).swap(load_plan(plan), settings)
    assert status.state == "done", (status, server.log[-3000:])
    assert {one.plan for one in read_statuses(server.control)} == {plan_number(load_plan(plan))}
    return status


def check_one_at_a_time(server, plans):
    """Of two swaps that are asked for at the same time one is done, and the other refused."""
    settings, served = SwapSettings(layers_per_pass=1), Served(server.url, server.control)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(served.swap, load_plan(path), settings) for path in plans[:2]]
        ended = [one.exception() or one.result().state for one in asked]
    assert "done" in ended, ended
    (refused,) = [one for one in ended if one != "done"]
    assert "not over" in str(refused), ended


def swap_command(server, plan):
    """What `semmoe swap` prints as JSON."""
    words = [sys.executable, *SEMMOE, "swap", server.url, "--plan", plan, "--control", str(server.control), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + server.log[-3000:]
    return done.stdout


def refused_swap(server, plan, capsys):
    """The line with which it ends."""
    words = ["semmoe", "swap", server.url, "--plan", plan, "--control", str(server.control)]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 1
    return capsys.readouterr().err


def check(model, prompts, reference, outputs):
    agreement = verify.compare_outputs(model, prompts, reference, outputs)
    assert agreement.holds, f"requests {agreement.mismatches} differ"
    assert agreement.identical >= len(reference) - 1, str(agreement)


def check_openai(url, model, prompts, reference, headers=None):
    """What an OpenAI client gets, streaming and not, as text."""
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers)
    for i in (3, 7, 11):
        given = {"model": model, "prompt": prompts[i], "max_tokens": NEW_TOKENS, "temperature": 0}
        expected = tokenizer.decode(reference[i], skip_special_tokens=True)
        assert client.completions.create(**given).choices[0].text == expected
        parts = [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True) if chunk.choices]
        assert "".join(parts) == expected


def plain_routing(model, prompt, output):
    """Tokens fed to the plain model and their experts (T, L, K), by falling weight."""
    import torch

    from semmoe.engines.transformers.recorder import RoutingRecorder

    fed = torch.tensor([[*prompt, *output[:-1]]])
    with RoutingRecorder(model) as recorder, torch.no_grad():
        recorder.begin(fed, torch.ones_like(fed, dtype=torch.bool), True)
        model(input_ids=fed, use_cache=False)
        return fed[0].numpy(), recorder.take()


def check_profiles(engine, options, tmp_path):
    """`semmoe profile` by an engine's server records what transformers' own does, token for token."""
    limits = ["--limit", "24", "--max-prompt-tokens", "120", "--max-new-tokens", "6"]
    for name, own in (("transformers", []), (engine, ["--", *options])):
        cli("profile", "tiny", *limits, "--out", str(tmp_path / name), "--engine", name, *own)
    ours, theirs = (by_prompt(open_trace(tmp_path / name)) for name in ("transformers", engine))
    assert ours.keys() == theirs.keys()
    for prompt, arrays in ours.items():
        for own, other in zip(arrays, theirs[prompt], strict=True):
            np.testing.assert_array_equal(own, other)


def by_prompt(trace):
    """Token ids, phases and experts of each request, which a server may end in any order."""
    rows = {tuple(trace.prompt(r).tolist()): trace.rows(r) for r in range(trace.num_requests)}
    return {prompt: [a[own] for a in (trace.token_ids, trace.phase, trace.expert_ids)] for prompt, own in rows.items()}
