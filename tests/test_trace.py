"""Traces on disk: whole or refused, appendable, never half-written."""

import io
import json
import pickle
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_fingerprint, make_trace, random_trace, with_prefill

from lab.save import save_trace
from semmoe.core import DECODE, PREFILL
from semmoe.io import files
from semmoe.io.npz import read_npz
from semmoe.traces.routing import RoutingWarning
from semmoe.traces.trace import (
    TraceHeader,
    TraceWriter,
    open_trace,
    possible_part,
    shard_paths,
)

HEADER = TraceHeader(fingerprint=make_fingerprint(), dataset_hash="d", settings={"max_new_tokens": 4})


def append(writer: TraceWriter, token: int, rows: int = 2) -> None:
    """A request of `rows` routed tokens, all alike, with a prompt of one."""
    writer.append(
        prompt_ids=np.array([token]), token_ids=np.full(rows, token),
        expert_ids=np.full((rows, 2, 2), [[0, 1], [2, 3]]), phase=np.full(rows, DECODE),
    )  # fmt: skip


@given(st.integers(0, 999))
def test_a_saved_trace_reads_back_the_same(tmp_path_factory, seed):
    trace = with_prefill(random_trace(seed, requests=4), 3)
    path = tmp_path_factory.mktemp("trace") / "t"
    save_trace(trace, path)
    back = open_trace(path)
    for name, array in vars(trace).items():
        np.testing.assert_array_equal(getattr(back, name), array)
    assert back.digest() == trace.digest()
    assert set(back.phase[:3]) == {PREFILL}


def test_a_trace_is_not_saved_over_another(tmp_path):
    save_trace(random_trace(0), tmp_path / "t")
    with pytest.raises(ValueError, match="already holds a trace"):
        save_trace(random_trace(0), tmp_path / "t")


def test_tokens_that_were_left_out_before_are_counted_too():
    trace = make_trace([[0, 1], [2]], np.array([[[0, 1]], [[1, 1]], [[0, 1]]]), vocab_size=4, num_experts=2)
    found = possible_part(replace(trace, left_out=3))
    assert (found.left_out, found.token_ids.tolist(), found.request_offsets.tolist()) == (4, [0, 2], [0, 1, 2])


@pytest.mark.parametrize("shard_tokens", [3, 4])
def test_shards_hold_whole_requests(tmp_path, shard_tokens):
    """Requests of two tokens; a shard is written as soon as it has as many tokens as it should."""
    with TraceWriter(tmp_path, HEADER, shard_tokens=shard_tokens) as writer:
        for token in range(5):
            append(writer, token)
    lengths = [files.load_arrays(path, _arrays())["request_lengths"].tolist() for path in shard_paths(tmp_path)]
    assert lengths == [[2, 2], [2, 2], [2]]
    assert open_trace(tmp_path).token_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("names", [{"a"}, {"a", "b", "c"}, {"a", "c"}])
def test_a_file_of_arrays_holds_exactly_the_names_that_are_asked_for(tmp_path, names):
    path = tmp_path / "two.safetensors"
    files.save_arrays(path, {"a": np.arange(3), "b": np.zeros((2, 2), np.float32)})
    assert sorted(files.load_arrays(path, {"a", "b"})) == ["a", "b"]
    with pytest.raises(ValueError, match=r"two.safetensors holds \['a', 'b'\], expected \['a'"):
        files.load_arrays(path, names)


def _arrays() -> set[str]:
    return {"token_ids", "expert_ids", "request_lengths", "phase", "prompt_ids", "prompt_lengths"}


def test_a_later_writer_appends_and_knows_how_far_the_first_came(tmp_path):
    for start in (0, 2):
        with TraceWriter(tmp_path, HEADER) as writer:
            assert writer.num_requests == start
            append(writer, start)
            append(writer, start + 1)
            assert writer.num_requests == start + 2
    trace = open_trace(tmp_path)
    assert trace.token_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trace.prompt_ids.tolist() == [0, 1, 2, 3]
    assert len(shard_paths(tmp_path)) == 2


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_profile_leaves_what_it_had(tmp_path, interruption):
    def profile():
        with TraceWriter(tmp_path, HEADER) as writer:
            append(writer, 4)
            raise interruption

    with pytest.raises(interruption):
        profile()
    assert open_trace(tmp_path).token_ids.tolist() == [4, 4]


def test_a_full_disk_leaves_earlier_shards_readable(tmp_path, monkeypatch):
    with TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 1)

    def half_write(arrays, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", half_write)
    with pytest.raises(OSError, match="No space left"), TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 2)
    assert open_trace(tmp_path).token_ids.tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-00000.safetensors", "trace.json"]


def test_appending_after_a_removed_shard_overwrites_nothing(tmp_path):
    for token in range(2):
        with TraceWriter(tmp_path, HEADER) as writer:
            append(writer, token)
    shard_paths(tmp_path)[0].unlink()
    with TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 2)
    assert open_trace(tmp_path).token_ids.tolist() == [1, 1, 2, 2]
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-00001.safetensors", "shard-00002.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        {"expert_ids": np.zeros((2, 1, 2), int)},
        {"expert_ids": np.zeros((1, 2, 2), int)},
        {"expert_ids": np.full((2, 2, 2), 4)},
        {"expert_ids": np.full((2, 2, 2), -1)},
        {"phase": np.zeros(3, int)},
    ],
)
def test_a_request_that_does_not_fit_the_model_is_our_own_mistake(tmp_path, change):
    request = {
        "prompt_ids": np.array([0]), "token_ids": np.array([1, 2]), "phase": np.ones(2, int),
        "expert_ids": np.zeros((2, 2, 2), int),
    }  # fmt: skip
    with pytest.raises(AssertionError), TraceWriter(tmp_path, HEADER) as writer:
        writer.append(**{**request, **change})
    assert shard_paths(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": make_fingerprint(tokenizer_hash="u")}, "another model or tokenizer: tokenizer_hash"),
        ({"fingerprint": make_fingerprint(num_experts=5)}, "another model or tokenizer: num_experts"),
        ({"dataset_hash": "e"}, "another dataset"),
        ({"settings": {"max_new_tokens": 5}}, "other settings"),
    ],
)
def test_another_run_is_not_appended(tmp_path, change, message):
    with TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 1)
    with pytest.raises(ValueError, match=message):
        TraceWriter(tmp_path, HEADER.model_copy(update=change))
    assert open_trace(tmp_path).num_requests == 1


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not a trace"):
        TraceWriter(tmp_path, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_truncated_shard_is_named(tmp_path):
    with TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 1)
    shard = shard_paths(tmp_path)[0]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors is truncated or damaged"):
        open_trace(tmp_path)


def test_a_shard_with_other_arrays_is_named(tmp_path):
    TraceWriter(tmp_path, HEADER)
    files.save_arrays(tmp_path / "shard-00000.safetensors", {"weights": np.zeros(3)})
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors holds \['weights'\]"):
        open_trace(tmp_path)


def test_a_shard_that_contradicts_the_header_is_refused(tmp_path):
    with TraceWriter(tmp_path, HEADER) as writer:
        append(writer, 6)
    with pytest.raises(ValueError, match="token id 6 is out of range for 6 vocabulary entries"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("extra", 1, "extra"), ("schema_version", 1, "schema version 1"), ("dataset_hash", 7, "dataset_hash")],
)
def test_a_header_of_another_form_is_refused(tmp_path, key, value, message):
    save_trace(random_trace(0), tmp_path / "t")
    header = tmp_path / "t" / "trace.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), key: value}))
    with pytest.raises(ValueError, match=message):
        open_trace(tmp_path / "t")


def test_an_unfilled_or_missing_trace_says_so(tmp_path):
    TraceWriter(tmp_path / "new", HEADER)
    with pytest.raises(ValueError, match="holds no shard yet"):
        open_trace(tmp_path / "new")
    with pytest.raises(ValueError, match="no trace at"):
        open_trace(tmp_path / "absent")
    (tmp_path / "new" / "trace.json").unlink()
    with pytest.raises(ValueError, match=r"trace\.json is missing"):
        open_trace(tmp_path / "new")


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.int16)])
def test_the_largest_expert_id_survives(tmp_path, experts, dtype):
    header = TraceHeader(fingerprint=make_fingerprint(num_experts=experts), dataset_hash="d", settings={})
    with TraceWriter(tmp_path, header) as writer:
        writer.append(
            prompt_ids=np.array([0]), token_ids=np.array([0]), phase=np.array([1]),
            expert_ids=np.tile([experts - 2, experts - 1], (1, 2, 1)),
        )  # fmt: skip
    ids = open_trace(tmp_path).expert_ids
    assert ids.dtype == dtype
    assert (ids == [experts - 2, experts - 1]).all()


def two_hundred(twins: int) -> dict[str, np.ndarray]:
    """Four requests of 50 tokens, the first and last `twins` of which name an expert twice."""
    experts = np.tile([[0, 1], [2, 3]], (200, 1, 1))
    experts[:twins, 1] = 3
    return {"token_ids": np.arange(200), "expert_ids": experts, "request_offsets": np.arange(0, 201, 50),
            "prompt_ids": np.arange(8), "prompt_offsets": np.arange(0, 9, 2)}  # fmt: skip


@pytest.mark.parametrize("form", ["npz", "directory"])
def test_tokens_that_name_an_expert_twice_are_left_out_with_a_warning(tmp_path, form):
    np.savez(tmp_path / "p.npz", **two_hundred(2))
    path = tmp_path / "p.npz"
    if form == "directory":
        path = tmp_path / "t"
        raw = read_npz(tmp_path / "p.npz")
        save_trace(raw, path)
    with pytest.warns(RoutingWarning, match="2 tokens name an expert twice in a layer and are left out; 198 are kept"):
        trace = open_trace(path)
    assert trace.token_ids.tolist() == list(range(2, 200))
    assert trace.request_offsets.tolist() == [0, 48, 98, 148, 198]
    assert trace.prompt(0).tolist() == [0, 1]
    assert trace.left_out == 2
    assert trace.select(np.array([1, 0])).left_out == 0
    np.savez(tmp_path / "p.npz", **two_hundred(3))
    with pytest.raises(ValueError, match="3 of 200 tokens name an expert twice"):
        open_trace(tmp_path / "p.npz")


def plain(**changes) -> dict[str, np.ndarray]:
    arrays = {
        "token_ids": np.array([3, 1, 2]), "expert_ids": np.array([[[0, 1]], [[2, 1]], [[3, 0]]]),
        "request_offsets": np.array([0, 2, 3]),
    }  # fmt: skip
    return {**arrays, **changes}


def test_a_plain_npz_is_read_with_sizes_from_its_contents(tmp_path):
    np.savez(tmp_path / "p.npz", **plain())
    trace = open_trace(tmp_path / "p.npz")
    f = trace.fingerprint
    assert (f.model, f.vocab_size, f.num_layers, f.num_experts, f.top_k, f.num_groups) == ("p", 4, 1, 4, 2, 1)
    assert trace.token_ids.tolist() == [3, 1, 2]
    assert trace.prompt(0).tolist() == [3, 1]
    assert trace.phase.tolist() == [PREFILL] * 3


def test_a_plain_npz_may_state_its_sizes(tmp_path):
    np.savez_compressed(tmp_path / "p.npz", **plain(vocab_size=9, num_experts=8, num_groups=2))
    f = open_trace(tmp_path / "p.npz").fingerprint
    assert (f.vocab_size, f.num_experts, f.num_groups) == (9, 8, 2)


def test_the_fingerprinting_layout_separates_prompts_from_routed_tokens(tmp_path):
    np.savez(
        tmp_path / "f.npz",
        tokens=np.array([10, 11, 12, 13, 20, 21, 22]), token_starts=np.array([0, 4, 7]), pos0=np.array([2, 1]),
        route_starts=np.array([0, 1, 3]), experts=np.array([[[0]], [[1]], [[2]]]),
    )  # fmt: skip
    trace = open_trace(tmp_path / "f.npz")
    assert trace.token_ids.tolist() == [12, 21, 22]
    assert [trace.prompt(r).tolist() for r in range(2)] == [[10, 11], [20]]
    assert trace.request_offsets.tolist() == [0, 1, 3]
    assert trace.fingerprint.vocab_size == 23, "also of a token that was not routed"
    assert trace.phase.tolist() == [DECODE] * 3


@pytest.mark.parametrize("pos0", [np.array([2.0, 1.0]), np.array(2), np.array([2])], ids=["float", "scalar", "short"])
def test_a_faulty_fingerprinting_layout_is_refused_by_name(tmp_path, pos0):
    np.savez(
        tmp_path / "f.npz", tokens=np.arange(7), token_starts=np.array([0, 4, 7]), pos0=pos0,
        route_starts=np.array([0, 1, 3]), experts=np.array([[[0]], [[1]], [[2]]]),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"f\.npz"):
        open_trace(tmp_path / "f.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 3}, "token id 3 is out of range for 3"),
        ({"num_experts": 2}, "expert id 3 is out of range for 2"),
        ({"token_ids": np.array([3, -1, 2])}, "token id -1"),
        ({"request_offsets": np.array([0, 3, 2])}, "request_offsets must rise from 0 to 3"),
        ({"request_offsets": np.array([0, 2])}, "request_offsets must rise from 0 to 3"),
        ({"token_ids": np.array([3, 1])}, "expert_ids has shape"),
        ({"expert_ids": np.array([[0, 1]])}, r"expected \(T, L, K\)"),
        ({"expert_ids": np.zeros((0, 1, 2), int)}, "it holds no routed token"),
        ({"token_ids": np.array([{}, {}, {}], object)}, "holds Python objects"),
        ({"phase": np.array([0, 2, 1])}, "phase 2 is out of range for 2 phases"),
        ({"phase": np.array([0, -1, 1])}, "phase -1 is out of range for 2 phases"),
        ({"phase": np.array([0, 0.5, 1])}, "phases are float64"),
        ({"request_offsets": np.array([0, 1.5, 3])}, "request_offsets are float64"),
        ({"prompt_offsets": np.array([0, 1.5, 3])}, "prompt_offsets are float64"),
        ({"prompt_ids": np.array([0.5, 1, 2])}, "prompt_ids are float64"),
        ({"vocab_size": 4.5}, "vocab_size are float64"),
        ({"vocab_size": np.array([4, 4])}, r"vocab_size has shape \(2,\)"),
        ({"num_experts": "many"}, "num_experts are"),
        ({"expert_ids": np.array([[[0, 1]], [[2, 1]], [[2**40, 0]]])}, "num_experts must lie between"),
        ({"expert_ids": np.array([[[0, 1]], [[2, 2]], [[3, 0]]])}, "1 of 3 tokens name an expert twice"),
    ],
)
def test_a_faulty_npz_is_refused_by_name(tmp_path, changes, message):
    np.savez(tmp_path / "p.npz", **plain(**changes))
    with pytest.raises(ValueError, match=message) as error:
        open_trace(tmp_path / "p.npz")
    assert "p.npz" in str(error.value)


def test_an_npz_without_the_arrays_names_what_it_holds(tmp_path):
    np.savez(tmp_path / "p.npz", weights=np.zeros(2))
    with pytest.raises(ValueError, match=r"holds \['weights'\]; a plain trace needs"):
        open_trace(tmp_path / "p.npz")


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_is_refused_and_never_run(tmp_path):
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Canary(tmp_path / "fired")))
    with pytest.raises(ValueError, match=r"p\.npz is not an \.npz file, or is truncated"):
        open_trace(tmp_path / "p.npz")
    np.savez(tmp_path / "q.npz", **plain(token_ids=np.array([Canary(tmp_path / "fired")] * 3, object)))
    with pytest.raises(ValueError, match="holds Python objects"):
        open_trace(tmp_path / "q.npz")
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize("keep", [0, 10, 300])
def test_a_truncated_npz_is_refused_by_name(tmp_path, keep):
    np.savez(tmp_path / "p.npz", **plain())
    (tmp_path / "p.npz").write_bytes((tmp_path / "p.npz").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"p\.npz is not an \.npz file, or is truncated"):
        open_trace(tmp_path / "p.npz")


def test_an_npz_damaged_inside_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "p.npz", **plain())
    raw = bytearray((tmp_path / "p.npz").read_bytes())
    name_length, extra_length = int.from_bytes(raw[26:28], "little"), int.from_bytes(raw[28:30], "little")
    raw[30 + name_length + extra_length] = 0b111  # a deflate block of the reserved type
    (tmp_path / "p.npz").write_bytes(raw)
    with pytest.raises(ValueError, match=r"p\.npz"):
        open_trace(tmp_path / "p.npz")


def packed(path, **members):
    """A zip archive of `.npy` members with the given bytes, and no word about them but its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def npy(shape, data):
    """An int32 array of a file that claims `shape`."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("shape", "data"), [((1 << 40,), bytes(4)), ((3,), bytes(16)), ((1 << 62, 1 << 62), b""), ((-1,), b"")]
)
def test_an_array_that_is_not_as_long_as_its_member_is_never_allocated(tmp_path, shape, data):
    good = {name: npy(array.shape, array.astype("<i4").tobytes()) for name, array in plain().items()}
    open_trace(packed(tmp_path / "good.npz", **good))
    packed(tmp_path / "p.npz", **good | {"token_ids": npy(shape, data)})
    with pytest.raises(ValueError, match=r"p\.npz.*token_ids\.npy should have -?[\d,]+ bytes, and \d+ are there"):
        open_trace(tmp_path / "p.npz")


def test_arrays_above_the_limit_are_never_unpacked(tmp_path, monkeypatch):
    zeros = np.zeros(1 << 23, np.int32)
    np.savez_compressed(tmp_path / "p.npz", **plain(token_ids=zeros))
    assert (tmp_path / "p.npz").stat().st_size < zeros.nbytes / 500
    monkeypatch.setattr("semmoe.io.npz.MAX_TRACE_BYTES", 1 << 20)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"p\.npz.* bytes unpacked, and at most 1,048,576 are read"):
        open_trace(tmp_path / "p.npz")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_an_array_named_npz_is_refused_by_name(tmp_path):
    with (tmp_path / "p.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match=r"p\.npz"):
        open_trace(tmp_path / "p.npz")


@pytest.mark.parametrize("name", ["token_ids", "prompt_ids"])
@pytest.mark.parametrize("beyond", [1 << 32, -(1 << 32)])
def test_a_token_id_beyond_32_bits_is_refused(tmp_path, name, beyond):
    """The id would be 2 if it were cut to 32 bits."""
    np.savez(tmp_path / "p.npz", **plain(**{name: np.array([3, 1, 2 + beyond]), "vocab_size": 9}))
    with pytest.raises(ValueError, match=rf"p\.npz: {name} do not fit|out of range"):
        open_trace(tmp_path / "p.npz")


@pytest.mark.parametrize("name", ["token_ids", "prompt_ids"])
def test_token_ids_that_are_no_integers_are_refused(tmp_path, name):
    np.savez(tmp_path / "p.npz", **plain(**{name: np.array([3.0, 1.0, 2.5])}))
    with pytest.raises(ValueError, match=rf"p\.npz: {name} are float64, expected integers"):
        open_trace(tmp_path / "p.npz")


def test_members_that_are_no_arrays_are_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "p.npz", "w") as file:
        for name in plain():
            file.writestr(name, b"text")
    with pytest.raises(ValueError, match=r"p\.npz"):
        open_trace(tmp_path / "p.npz")


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 77)], ids=["encrypted", "unknown compression"])
def test_members_that_cannot_be_unpacked_are_refused_by_name(tmp_path, offset, value):
    np.savez(tmp_path / "p.npz", **plain())
    raw = bytearray((tmp_path / "p.npz").read_bytes())
    raw[raw.find(b"PK\x01\x02") + offset] = value
    (tmp_path / "p.npz").write_bytes(raw)
    with pytest.raises(ValueError, match=r"p\.npz"):
        open_trace(tmp_path / "p.npz")


def test_expert_ids_that_are_no_integers_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", **plain(expert_ids=plain()["expert_ids"] + 0.5, num_experts=8))
    with pytest.raises(ValueError, match=r"p\.npz: expert_ids are float64, expected integers"):
        open_trace(tmp_path / "p.npz")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "trace.csv").write_text("1,2,3")
    with pytest.raises(ValueError, match=r"neither a trace directory nor an \.npz"):
        open_trace(tmp_path / "trace.csv")
