"""`semmoe trace`: traces that may be larger than memory are counted, joined and sampled shard by shard."""

import json
import re
import stat
import warnings
from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_trace, random_trace
from test_apply import failed
from typer.testing import CliRunner

from lab.save import save_trace
from semmoe.cli import app
from semmoe.core import DECODE, RoutingTrace
from semmoe.traces import streams
from semmoe.traces.trace import TraceHeader, TraceWriter, open_trace


def run(*words):
    return CliRunner().invoke(app, ["trace", *map(str, words)])


def write(trace, path, shard_tokens=50):
    """A trace of many shards; returns its path."""
    header = TraceHeader(fingerprint=trace.fingerprint, dataset_hash="", settings={})
    with TraceWriter(path, header, shard_tokens=shard_tokens) as writer:
        for request in range(trace.num_requests):
            writer.append_one(trace, request)
    return path


def arrays(trace):
    return {name: array for name, array in vars(trace).items() if isinstance(array, np.ndarray)}


def same(first: RoutingTrace, second: RoutingTrace):
    for name, array in arrays(first).items():
        np.testing.assert_array_equal(array, arrays(second)[name], name)
    assert first.fingerprint == second.fingerprint


def test_what_a_trace_holds_is_the_same_whole_and_by_shards(tmp_path):
    trace = random_trace(0, requests=60)
    path = write(trace, tmp_path / "trace")
    found = json.loads(run("info", path, "--json").stdout)
    assert found["files"] > 3
    assert (found["requests"], found["tokens"]) == (60, trace.num_tokens)
    assert found["decode_tokens"] == (trace.phase == DECODE).sum()
    assert found["prompt_tokens"] == len(trace.prompt_ids)
    assert found["distinct_tokens"] == len(np.unique(trace.token_ids))
    load = np.stack([np.bincount(trace.expert_ids[:, l].ravel(), minlength=8) for l in range(3)])
    assert found["busiest_expert"] == pytest.approx((load.max(axis=1) / load.mean(axis=1)).mean())
    save_trace(trace, tmp_path / "whole")
    whole = json.loads(run("info", tmp_path / "whole", "--json").stdout)
    assert whole["busiest_expert"] == found["busiest_expert"]
    assert f"{trace.num_tokens:,}" in run("info", path).stdout


@pytest.mark.parametrize("spare", [0, 1])
def test_a_trace_that_just_fits_is_read_whole(tmp_path, monkeypatch, spare):
    trace = random_trace(4, requests=20)
    path = write(trace, tmp_path / "trace")
    monkeypatch.setattr(streams, "MOST_IDS", (trace.num_tokens - 1 + spare) * 3 * 2)
    with warnings.catch_warnings(record=True) as caught:
        found = streams.open_bounded(path, 0)
    assert [f"{trace.num_tokens} tokens" in str(one.message) for one in caught] == [True] * (1 - spare)
    assert spare == 0 or found.num_tokens == trace.num_tokens


def test_traces_are_joined_each_in_its_order(tmp_path):
    parts = [random_trace(seed, requests=n) for seed, n in ((1, 30), (2, 12))]
    paths = [write(part, tmp_path / f"part-{i}") for i, part in enumerate(parts)]
    told = json.loads(run("merge", *paths, "--out", tmp_path / "joined", "--json").stdout)
    assert told["tokens"] == sum(part.num_tokens for part in parts)
    joined = open_trace(tmp_path / "joined")
    assert stat.S_IMODE((tmp_path / "joined").stat().st_mode) == 0o700
    place = [((r + 0.5) / part.num_requests, i) for i, part in enumerate(parts) for r in range(part.num_requests)]
    order = [i for _, i in sorted(place)]
    assert {0, 1} == set(order[-5:])  # the newest are of both
    for i, part in enumerate(parts):
        same(joined.select(np.flatnonzero(np.array(order) == i)), part)
    failed(run("merge", *paths, "--out", tmp_path / "joined"), 2, "exists: choose another name")


def test_traces_that_do_not_fit_together_are_not_joined(tmp_path):
    first = write(random_trace(0), tmp_path / "first")
    other = write(random_trace(0, experts=16), tmp_path / "other")
    failed(run("merge", first, other, "--out", tmp_path / "out"), 2, "of another model or tokenizer")
    assert not (tmp_path / "out").exists()


def test_a_sample_is_of_whole_requests_in_their_order(tmp_path):
    trace = random_trace(3, requests=80)
    path = write(trace, tmp_path / "trace")
    drawn = streams.sample(path, 100, seed=1)
    assert 100 <= drawn.num_tokens < 100 + 12
    known = {key: r for r, key in enumerate(trace.request_hashes().tolist())}
    places = [known[key] for key in drawn.request_hashes().tolist()]
    assert places == sorted(places)
    same(drawn, trace.select(np.array(places)))
    same(streams.sample(path, 100, seed=1), drawn)
    assert streams.sample(path, 100, seed=2).digest() != drawn.digest()
    same(streams.sample(path, 10**9, seed=1), trace)


def test_a_trace_that_is_too_large_is_sampled_and_that_is_said(tmp_path, monkeypatch):
    trace = random_trace(4, requests=120)
    path = write(trace, tmp_path / "trace")
    monkeypatch.setattr(streams, "MOST_IDS", 300 * 3 * 2)
    done = CliRunner().invoke(app, ["solve", str(path), "--ep-size", "2", "--out", str(tmp_path / "plan"), "--quick"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert f"has {trace.num_tokens:,} tokens, more than are read at once: 30" in said
    assert re.search(r"tokens count, of [0-9]+ requests drawn by seed 0", said)


def test_an_empty_trace_is_refused(tmp_path):
    trace = random_trace(0)
    path = tmp_path / "trace"
    TraceWriter(path, TraceHeader(fingerprint=trace.fingerprint, dataset_hash="", settings={}))
    failed(run("info", path), 2, "holds no shard yet")
    with pytest.raises(ValueError, match="holds no shard yet"):
        streams.sample(path, 100, seed=1)


def test_description_counts_each_kind_of_token(tmp_path):
    trace = make_trace([[5, 5], [3]], np.tile([[0, 1]], (3, 2, 1)), prompts=[[1, 2], [3, 4]])
    path = write(replace(trace, phase=np.array([0, 1, 1], np.uint8)), tmp_path / "trace")
    counts = streams.describe(path)
    shown = {name: counts[name] for name in ("requests", "tokens", "decode_tokens", "prompt_tokens", "distinct_tokens")}
    assert shown == {"requests": 2, "tokens": 3, "decode_tokens": 2, "prompt_tokens": 4, "distinct_tokens": 2}
    assert counts["num_experts"] == trace.fingerprint.num_experts
