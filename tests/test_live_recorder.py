"""Recording a live server: each token once, bounded, private, and never an exception into the server."""

import contextlib
import itertools
import os
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_fingerprint
from waiting import eventually

from semmoe.core import DECODE, PREFILL, RoutingTrace
from semmoe.engines.private import check_folder, open_folder
from semmoe.live.recorder import memory
from semmoe.live.recorder import recorder as recorder_module
from semmoe.live.recorder.files import Control, rank_folder, read_status, status_path, write_control
from semmoe.live.recorder.memory import Requests, Rows, RowStore, sampled
from semmoe.live.recorder.recorder import LiveRecorder
from semmoe.traces.trace import TraceWriter, open_trace, shard_paths

F = make_fingerprint(vocab_size=100, num_layers=3, num_experts=8, top_k=2)
RUNS = itertools.count()


class Looking(LiveRecorder):
    """Looks at the control file with every pass; others have a thread for that."""

    def poll(self) -> bool:
        self.look()
        return self.recording


def recorder(folder: Path, rank: int = 0, fingerprint=F) -> LiveRecorder:
    return Looking(folder / "control", fingerprint, rank, watch=False)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Few looks between writes."""
    monkeypatch.setattr(recorder_module, "STATUS_LOOKS", 1)
    monkeypatch.setattr(recorder_module, "SAVE_LOOKS", 5)


def start(folder: Path, **options) -> Control:
    control = Control(run=f"run{next(RUNS)}", recording=True, **options)
    open_folder(folder / "control")
    write_control(folder / "control", control)
    return control


def stop(folder: Path, control: Control) -> None:
    write_control(folder / "control", control.model_copy(update={"recording": False}))


def routing(token: int, position: int) -> np.ndarray:
    """(L, K): what this model chooses for a token at a position."""
    first = (token + position + np.arange(F.num_layers)) % F.num_experts
    return np.stack([first, (first + 1 + token % 3) % F.num_experts], axis=1)


def run(target: LiveRecorder, *parts: tuple[str, int, list[int]]) -> None:
    """A forward pass; each part: a request, the position of its first token, its tokens."""
    rows = np.repeat(np.arange(len(parts)), [len(tokens) for *_, tokens in parts])
    positions = np.concatenate([first + np.arange(len(tokens)) for _, first, tokens in parts])
    tokens = np.concatenate([tokens for *_, tokens in parts])
    experts = np.array([routing(t, p) for t, p in zip(tokens.tolist(), positions.tolist(), strict=True)])
    assert target.poll()
    experts = experts.reshape(-1, F.num_layers, F.top_k)
    target.observe([name for name, *_ in parts], Rows(rows, positions, tokens, experts))


def traced(folder: Path, control: Control, rank: int = 0) -> RoutingTrace:
    return open_trace(rank_folder(folder / "control", control.run, rank))


def requests_of(trace: RoutingTrace) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, routed tokens and phases of each request."""
    bounds = itertools.pairwise(trace.request_offsets.tolist())
    return [
        (trace.prompt(r).tolist(), trace.token_ids[a:b].tolist(), trace.phase[a:b].tolist())
        for r, (a, b) in enumerate(bounds)
    ]


def test_the_worked_example(tmp_path):
    """The one in the module's docstring: a prefix cache, chunks and a preemption."""
    control = start(tmp_path)
    live = recorder(tmp_path)
    run(live, ("a", 0, [7, 8]))
    run(live, ("a", 2, [9]), ("b", 2, [9]))
    run(live, ("a", 3, [5]))
    run(live, ("a", 0, [7, 8]), ("b", 3, [6]))
    run(live, ("a", 2, [9, 5]))
    run(live, ("a", 4, [4]))
    live.finish("a", [7, 8, 9])
    live.finish("b", [7, 8, 9])
    live.close()
    trace = traced(tmp_path, control)
    assert requests_of(trace) == [
        ([7, 8, 9], [7, 8, 9, 5, 4], [PREFILL] * 3 + [DECODE] * 2),
        ([7, 8, 9], [9, 6], [PREFILL, DECODE]),
    ]
    expected = [routing(t, p) for t, p in ((7, 0), (8, 1), (9, 2), (5, 3), (4, 4), (9, 2), (6, 3))]
    np.testing.assert_array_equal(trace.expert_ids, expected)
    assert live.status.tokens_seen == 11
    assert (live.status.state, live.status.requests, live.status.tokens) == ("stopped", 2, 7)


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path):
    live = recorder(tmp_path)
    assert not live.poll()
    live.observe(["a"], Rows(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), np.zeros((1, 3, 2), int)))
    live.finish("a", [0])
    live.close()
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["status-00000.json"]
    assert read_status(status_path(tmp_path / "control", 0)).state == "off"


def test_it_starts_and_stops_as_the_control_file_says(tmp_path):
    live = recorder(tmp_path)
    assert not live.poll()
    control = start(tmp_path)
    run(live, ("a", 5, [1, 2]))  # under way when recording starts: what is seen from then on
    live.finish("a", [1])
    run(live, ("b", 0, [3]))
    stop(tmp_path, control)
    assert not live.poll()
    status = read_status(status_path(tmp_path / "control", 0))
    assert (status.state, status.requests, status.unfinished, status.bytes_held) == ("stopped", 1, 1, 0)
    assert requests_of(traced(tmp_path, control)) == [([1], [1, 2], [DECODE, DECODE])]
    write_control(tmp_path / "control", control)
    assert not live.poll()  # a run that has ended is not begun again
    second = start(tmp_path)
    run(live, ("c", 0, [4]))
    live.finish("c", [4])
    live.close()
    assert requests_of(traced(tmp_path, second)) == [([4], [4], [PREFILL])]


def test_requests_that_ended_are_written_at_every_fifth_look(tmp_path):
    control = start(tmp_path)
    live = recorder(tmp_path)
    written = []
    for i in range(11):
        run(live, (f"request-{i}", 0, [1]))
        written.append(len(shard_paths(rank_folder(tmp_path / "control", control.run, 0))))
        live.finish(f"request-{i}", [1])
    assert written == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    live.close()


def test_a_thread_sees_the_control_file_without_traffic(tmp_path):
    live = LiveRecorder(tmp_path / "control", F, 0)
    assert not live.recording
    control = start(tmp_path)
    eventually(lambda: live.recording, 20, 0.05)
    stop(tmp_path, control)
    eventually(lambda: read_status(status_path(tmp_path / "control", 0)).state == "stopped", 20, 0.05)
    assert not live.recording
    live.close()
    start(tmp_path)
    time.sleep(2 * recorder_module.LOOK_SECONDS)
    assert not live.recording


@given(st.integers(0, 9999))
def test_any_way_of_running_requests_gives_the_trace_of_one_pass(tmp_path_factory, seed):
    """Chunks, several requests a pass, preemption to any earlier token and recomputation: each token once."""
    folder, rng = tmp_path_factory.mktemp("live"), np.random.default_rng(seed)
    lengths = rng.integers(1, 13, rng.integers(1, 6)).tolist()
    tokens = [[(7 * r + 3 * p) % F.vocab_size for p in range(length)] for r, length in enumerate(lengths)]
    reached = [int(rng.integers(length)) for length in lengths]  # what a prefix cache serves runs for nobody
    once, first = list(reached), {}
    control = start(folder)
    live = recorder(folder)
    while once != lengths:
        parts = []
        for r in rng.permutation(len(lengths)).tolist():
            if once[r] == lengths[r] or rng.random() < 0.5:
                continue
            if rng.random() < 0.25:
                reached[r] = int(rng.integers(reached[r] + 1))
            chunk = tokens[r][reached[r] : reached[r] + int(rng.integers(1, 6))]
            parts.append((f"r{r}", reached[r], chunk))
            first.setdefault(r, reached[r])  # below it, what comes back after a preemption is not recorded
            reached[r] += len(chunk)
            once[r] = max(once[r], reached[r])
        if parts:
            run(live, *parts)
    for r, prompt in enumerate(tokens):
        live.finish(f"r{r}", prompt[: 1 + len(prompt) // 2])
    live.close()
    trace = traced(folder, control)
    assert requests_of(trace) == [
        (
            p[: 1 + len(p) // 2],
            p[first[r] :],
            [PREFILL if i <= len(p) // 2 else DECODE for i in range(first[r], len(p))],
        )
        for r, p in enumerate(tokens)
    ]
    seen = [(t, p) for r, request in enumerate(tokens) for p, t in enumerate(request) if p >= first[r]]
    np.testing.assert_array_equal(trace.expert_ids, [routing(t, p) for t, p in seen])


def test_rows_in_any_order_and_twice_in_a_pass(tmp_path):
    control = start(tmp_path)
    live = recorder(tmp_path)
    assert live.poll()
    positions, rows = np.array([2, 0, 1, 1, 0]), np.array([0, 1, 0, 0, 2])
    tokens = np.array([12, 20, 11, 11, 10])
    experts = np.array([routing(t, p) for t, p in zip(tokens, positions, strict=True)])
    live.observe(["a", "b", "a"], Rows(rows, positions, tokens, experts))  # one request may stand twice
    live.finish("a", [10])
    live.finish("b", [20])
    live.close()
    assert [tokens for _, tokens, _ in requests_of(traced(tmp_path, control))] == [[10, 11, 12], [20]]


def test_unknown_ids_are_left_out_and_counted(tmp_path):
    control = start(tmp_path)
    live = recorder(tmp_path)
    assert live.poll()
    rows, positions, tokens = (
        np.array([0, 0, 0, 0, 7, -1]),
        np.array([0, 1, 2, -3, 4, 5]),
        np.array([1, 100, 3, 4, 5, 6]),
    )
    experts = np.tile(routing(1, 0), (6, 1, 1))
    experts[2, 1, 1] = -1
    live.observe(["a"], Rows(rows, positions, tokens, experts))
    run(live, ("a", 6, [9]))
    live.finish("a", [1, 1000, -5])
    live.close()
    assert requests_of(traced(tmp_path, control)) == [([1], [1, 9], [PREFILL, DECODE])]
    assert live.status.unknown == 5 + 2


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint32, np.int64, np.uint8])
def test_ids_of_any_integer_type(tmp_path, dtype):
    control = start(tmp_path)
    live = recorder(tmp_path)
    assert live.poll()
    experts = np.stack([routing(3, 0), routing(4, 1)]).astype(dtype)
    live.observe(["a"], Rows(np.zeros(2, dtype), np.arange(2).astype(dtype), np.array([3, 4], dtype), experts))
    experts[:] = 0  # an engine may reuse its buffer
    live.finish("a", np.array([3], dtype))
    live.close()
    np.testing.assert_array_equal(traced(tmp_path, control).expert_ids, [routing(3, 0), routing(4, 1)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"expert_ids": np.zeros((1, 2, 2), int)}, {"expert_ids": np.zeros((1, 3, 2))}, {"positions": np.zeros(2, int)},
        {"slots": None}, {"requests": [[]]},
    ],
)  # fmt: skip
def test_what_an_adaptor_gets_wrong_switches_off_and_does_not_raise(tmp_path, wrong):
    start(tmp_path)
    live = recorder(tmp_path)
    assert live.poll()
    arguments = {
        "requests": ["a"], "slots": np.zeros(1, int), "positions": np.zeros(1, int), "token_ids": np.zeros(1, int),
        "expert_ids": np.zeros((1, 3, 2), int),
    }  # fmt: skip
    given = arguments | wrong
    live.observe(given.pop("requests"), Rows(**given))
    assert not live.poll()
    status = read_status(status_path(tmp_path / "control", 0))
    assert status.state == "failed"
    assert status.reason


def test_more_than_256_experts(tmp_path):
    f = make_fingerprint(vocab_size=100, num_layers=3, num_experts=300, top_k=2)
    control = start(tmp_path)
    live = recorder(tmp_path, fingerprint=f)
    assert live.poll()
    live.observe(["a"], Rows(np.zeros(1, int), np.zeros(1, int), np.ones(1, int), np.full((1, 3, 2), [[299, 0]])))
    live.finish("a", [1])
    live.close()
    assert traced(tmp_path, control).expert_ids.tolist() == [[[299, 0]] * 3]


def test_a_request_is_sampled_by_its_name_alone(tmp_path):
    names = [f"request-{i}" for i in range(400)]
    chosen = [name for name in names if sampled(name, 0.25)]
    assert 60 < len(chosen) < 140
    assert {n for n in names if sampled(n, 0.1)} < set(chosen)
    control = start(tmp_path, sample=0.25)
    for rank in (0, 1):
        live = recorder(tmp_path, rank)
        for i, name in enumerate(names):
            run(live, (name, 0, [i % 100]))
        for i, name in enumerate(names):
            live.finish(name, [i % 100])
        live.close()
        found = [tokens[0] for _, tokens, _ in requests_of(traced(tmp_path, control, rank))]
        assert found == [i % 100 for i, name in enumerate(names) if name in chosen]


def test_names_of_requests_that_are_not_recorded_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(memory, "MOST_REFUSED", 10)
    requests = Requests(1e-9)
    for i in range(100):
        requests.slots([f"r{i}"])
    assert len(requests._slot) <= 12


def test_more_requests_at_a_time_than_there_is_room_for(monkeypatch):
    requests = Requests(1.0)
    requests._free = [5]
    assert requests.slots(["a", "b", "a"]).tolist() == [5, memory.REFUSED, 5]
    assert (requests.skipped, len(requests)) == (1, 1)
    requests.release([requests.end("a")])
    assert requests.slots(["b", "c"]).tolist() == [memory.REFUSED, 5]  # b was refused for good


def test_a_slot_that_is_used_again_begins_with_no_rows():
    requests, routed = Requests(1.0), np.zeros((3, F.num_layers, F.top_k), int)
    (slot,) = requests.slots(["a"])
    requests.advance(Rows(np.full(3, slot), np.array([4, 5, 6]), np.ones(3, int), routed))
    assert (requests.rows[slot], requests.highest[slot]) == (3, 6)
    requests.release([requests.end("a")])
    assert requests.slots(["b"]).tolist() == [slot]
    assert (requests.rows[slot], requests.highest[slot]) == (0, -1)
    requests.advance(Rows(np.array([slot]), np.array([0]), np.ones(1, int), routed[:1]))
    assert (requests.rows[slot], requests.highest[slot], len(requests)) == (1, 0, 1)


def test_of_two_requests_the_longer_is_dropped_though_the_other_s_slot_was_used_before(tmp_path, monkeypatch):
    """The rows of an earlier request in the same slot do not count."""
    small_store(monkeypatch, 8)
    control = start(tmp_path, max_mb=1)
    live = recorder(tmp_path)
    run(live, ("before", 0, [4] * 6))
    live.finish("before", [4])
    run(live, ("short", 0, [2] * 2))
    run(live, ("long", 0, [1] * 5))
    run(live, ("short", 2, [2] * 2))
    for name in ("long", "short"):
        live.finish(name, [9])
    live.close()
    assert live.status.dropped == 1
    assert [tokens for _, tokens, _ in requests_of(traced(tmp_path, control))] == [[4] * 6, [2] * 4]


def test_a_request_that_was_never_seen_leaves_nothing(tmp_path):
    control = start(tmp_path)
    live = recorder(tmp_path)
    run(live, ("b", 0, [2]))
    live.finish("never seen", [1])
    live.finish("b", [2])
    live.close()
    assert requests_of(traced(tmp_path, control)) == [([2], [2], [PREFILL])]
    assert live.status.requests == 1


def small_store(monkeypatch, rows: int) -> None:
    """Memory for `rows` rows, and one of a shard beside."""
    monkeypatch.setattr(memory, "SHARD_TOKENS", 1)
    monkeypatch.setattr(memory, "row_bytes", lambda fingerprint: 10**6 // (rows + 1))


def test_when_memory_is_full_new_requests_are_skipped_then_the_longest_dropped(tmp_path, monkeypatch):
    small_store(monkeypatch, 8)
    control = start(tmp_path, max_mb=1)
    live = recorder(tmp_path)
    run(live, ("long", 0, [1] * 5), ("short", 0, [2] * 2))
    run(live, ("new", 0, [3] * 2))
    assert (live.status.skipped, live.status.dropped) == (1, 0)
    run(live, ("new", 2, [3]), ("short", 2, [2]))  # a skipped request stays out
    run(live, ("short", 3, [2]))
    assert (live.status.skipped, live.status.dropped) == (1, 1)
    run(live, ("long", 5, [1]))  # and so does a dropped one
    for name in ("long", "short", "new"):
        live.finish(name, [9])
    live.close()
    assert [tokens for _, tokens, _ in requests_of(traced(tmp_path, control))] == [[2] * 4]


def test_a_pass_that_memory_cannot_hold(tmp_path, monkeypatch):
    small_store(monkeypatch, 8)
    control = start(tmp_path, max_mb=1)
    live = recorder(tmp_path)
    run(live, ("a", 0, [1] * 20))
    run(live, ("b", 0, [2]))
    run(live, ("b", 1, [2] * 20))
    run(live, ("c", 0, [3]))
    for name in "abc":
        live.finish(name, [1])
    live.close()
    assert (live.status.skipped, live.status.dropped) == (1, 1)
    assert [tokens for _, tokens, _ in requests_of(traced(tmp_path, control))] == [[3]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), min_size=1, max_size=40))
def test_memory_stays_bounded_whatever_comes(tmp_path_factory, passes):
    """And what is written is always whole: from a request's first row that was seen to its last."""
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_store(monkeypatch, 16)
        control = start(folder, max_mb=1)
        live, names = recorder(folder), [f"r{i}.0" for i in range(6)]
        reached, expected = [0] * 6, {}
        for i, count, ends in passes:
            run(live, (names[i], reached[i], [10 * i + reached[i] % 10] * count))
            reached[i] += count
            assert live.status.bytes_held <= 16 * memory.row_bytes(F)
            if ends:
                expected[names[i]] = reached[i]
                live.finish(names[i], [i])
                names[i], reached[i] = names[i].split(".")[0] + f".{len(expected)}", 0
        live.close()
    assert live.status.state == "stopped"
    parts = rank_folder(folder / "control", control.run, 0)
    lengths = [len(t) for _, t, _ in requests_of(open_trace(parts))] if live.status.requests else []
    assert len(lengths) == live.status.requests
    assert set(lengths) <= set(expected.values())
    assert len(lengths) >= len(expected) - live.status.skipped - live.status.dropped


def test_rows_come_back_by_request_and_position():
    """Against a plain list, with rows returned and used again."""
    rng, store, held = np.random.default_rng(0), RowStore(F, 50), []
    for step in range(60):
        n = int(rng.integers(0, min(10, store.free + 1)))
        new = [(int(rng.integers(5)), 100 * step + i, int(rng.integers(100))) for i in range(n)]
        slots, positions, tokens = (np.array([row[i] for row in new], np.int64) for i in range(3))
        store.put(Rows(slots, positions, tokens, np.array([routing(t, 0) for t in tokens], int).reshape(-1, 3, 2)))
        held += new
        assert store.used == len(held)
        if step % 3 == 2:
            chosen = rng.permutation(5)[:3].tolist()
            for slot, rows in zip(chosen, store.pop(chosen), strict=True):
                expected = sorted(row for row in held if row[0] == slot)
                assert list(zip(rows.slots, rows.positions, rows.token_ids, strict=True)) == expected
                np.testing.assert_array_equal(rows.expert_ids.reshape(-1, 3, 2), np.array(
                    [routing(t, 0) for *_, t in expected]).reshape(-1, 3, 2))  # fmt: skip
            held = [row for row in held if row[0] not in chosen]


def test_it_stops_at_max_tokens(tmp_path):
    control = start(tmp_path, max_tokens=5)
    live = recorder(tmp_path)
    for name in "abc":
        run(live, (name, 0, [1, 2]))
        live.finish(name, [1, 2])
    live.poll()
    for _ in range(40):
        live.poll()
    assert not live.recording
    status = read_status(status_path(tmp_path / "control", 0))
    assert (status.state, status.tokens, status.dropped) == ("stopped", 4, 1)
    assert status.reason == "max_tokens 5 is reached"
    assert traced(tmp_path, control).num_tokens == 4


def modes(folder: Path) -> set[tuple[bool, str]]:
    return {(p.is_dir(), oct(stat.S_IMODE(p.lstat().st_mode))) for p in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        start(tmp_path)
        live = recorder(tmp_path)
        run(live, ("a", 0, [1]))
        live.finish("a", [1])
        live.close()
    finally:
        os.umask(before)
    assert live.status.state == "stopped"
    assert modes(tmp_path / "control") == {(True, "0o700"), (False, "0o600")}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    start(tmp_path)
    (tmp_path / "control").chmod(0o777)
    live = recorder(tmp_path)
    assert not live.poll()
    assert "can be written by others" in live.status.reason
    assert not status_path(tmp_path / "control", 0).exists()


def test_a_folder_or_link_of_somebody_else_is_refused(tmp_path, monkeypatch):
    open_folder(tmp_path / "control")
    (tmp_path / "link").symlink_to(tmp_path / "control")
    check_folder(tmp_path / "link")  # our own link is
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="is a symbolic link of another user"):
        check_folder(tmp_path / "link")
    with pytest.raises(ValueError, match="belongs to user"):
        check_folder(tmp_path / "control")
    with pytest.raises(ValueError, match="does not exist"):
        check_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "not valid"), ('{"run": "a", "recording": true, "colour": 1}', "colour"),
        ('{"run": "../a", "recording": true}', "run"), ('{"run": "a", "recording": true, "sample": 0}', "sample"),
        ('{"run": "a", "recording": true, "sample": NaN}', "not valid"), ('{"run": "a", "recording": 1}', "recording"),
        ('{"run": "a", "recording": true, "max_mb": 0}', "max_mb"), ("[" * 60000, "not valid"), ("x" * 70000, "bytes"),
        ('{"schema_version": 2, "run": "a", "recording": true}', "schema_version"), ("", "not valid"),
    ],
)  # fmt: skip
def test_a_damaged_control_file_means_off(tmp_path, content, word):
    control = start(tmp_path)
    live = recorder(tmp_path)
    run(live, ("a", 0, [1]))
    live.finish("a", [1])
    (tmp_path / "control" / "control.json").write_text(content)
    assert not live.poll()
    status = read_status(status_path(tmp_path / "control", 0))
    assert status.state == "stopped"
    assert word in status.reason
    assert traced(tmp_path, control).num_requests == 1  # what has ended is kept
    live = recorder(tmp_path, rank=1)
    assert not live.poll()
    assert word in read_status(status_path(tmp_path / "control", 1)).reason


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "open to all", "gone"])
def test_a_control_file_of_another_kind_means_off(tmp_path, kind):
    start(tmp_path)
    live = recorder(tmp_path)
    assert live.poll()
    path = tmp_path / "control" / "control.json"
    other = path.rename(tmp_path / "other.json")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "open to all":
        other.rename(path)
        path.chmod(0o666)
    assert not live.poll()
    assert live.status.reason


@contextlib.contextmanager
def full_disk():
    """No file may grow, as on a full disk: the limit's error (27) stands for that of a disk (28), which needs root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_recording_and_keeps_what_is_written(tmp_path):
    control = start(tmp_path)
    live = recorder(tmp_path)
    run(live, ("a", 0, [1]))
    live.finish("a", [1])
    for _ in range(40):
        live.poll()
    run(live, ("b", 0, [2]))
    with full_disk():
        live.finish("b", [2])
        for _ in range(40):
            live.poll()
    assert not live.recording
    assert (live.status.state, live.status.bytes_held) == ("failed", 0)
    assert "too large" in live.status.reason.lower()
    assert requests_of(traced(tmp_path, control)) == [([1], [1], [PREFILL])]


@pytest.mark.parametrize("target", ["append", "flush"])
def test_another_fault_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, target):
    start(tmp_path)
    live = recorder(tmp_path)
    run(live, ("a", 0, [1]))

    def broken(*arguments, **named):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(TraceWriter, target, broken)
    live.finish("a", [1])
    for _ in range(400):
        live.poll()
    assert not live.recording
    status = read_status(status_path(tmp_path / "control", 0))
    assert (status.state, status.bytes_held) == ("failed", 0)
    assert "Input/output error" in status.reason
    live.observe(["a"], Rows(*[np.zeros(1, int)] * 3, np.zeros((1, 3, 2), int)))
    live.finish("a", [1])
    live.close()


def test_a_disk_so_full_that_not_even_the_status_fits(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    control = start(tmp_path)
    monkeypatch.setattr(recorder_module, "write_status", full)
    live = recorder(tmp_path)
    run(live, ("a", 0, [1]))
    live.finish("a", [1])
    live.close()
    assert live.status.state == "stopped"
    assert traced(tmp_path, control).num_requests == 1


def test_a_restarted_server_goes_on_with_the_run(tmp_path):
    control = start(tmp_path, max_tokens=4)
    for name in "ab":
        live = recorder(tmp_path)
        run(live, (name, 0, [1, 2]))
        live.finish(name, [1, 2])
        live.close()
    assert live.status.reason == "max_tokens 4 is reached"
    assert traced(tmp_path, control).num_requests == 2


def test_the_cost_is_stated_per_token(tmp_path):
    start(tmp_path)
    live = recorder(tmp_path)
    assert live.status.cpu_us_per_token == 0
    run(live, ("a", 0, [1] * 10))
    assert 0 < live.status.cpu_us_per_token < 1e5
    live.close()
    assert live.status.cpu_us_per_token > 0


def test_the_recorder_needs_neither_torch_nor_an_engine():
    heavy = "('torch', 'transformers', 'sglang', 'vllm')"
    code = f"import sys, semmoe.live.recorder.recorder; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
