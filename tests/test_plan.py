"""Plans on disk: the same bytes for the same input, whole or not at all, checked in every index."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from synthetic import random_trace

from semmoe import plan as plan_module
from semmoe.core import NEVER
from semmoe.plan import load_plan, save_plan
from semmoe.settings import CoclusterSettings, PaperSettings, PredictorSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

QUICK = PaperSettings(steps=2, swaps_per_expert=10)
SEMMOE = SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10), predictor=PredictorSettings(lookback=2))
CASES = {
    "tp": (1, SolveSettings(method="paper", paper=QUICK)),
    "dp": (4, SolveSettings(method="paper", paper=QUICK)),
    "hybrid": (2, SolveSettings(method="paper", paper=replace(QUICK, lookback=1))),
    "linear": (1, SolveSettings(method="linear")),
    "eplb": (4, SolveSettings(method="eplb", redundant_experts=4)),
    "scores": (1, SEMMOE),
    "request map": (4, SEMMOE),
    "request map and scores": (2, replace(SEMMOE, redundant_experts=4)),
}


UNPREFIXED = ("physical_to_logical_map", "static_dispatch", "fixed_copies", "profiled_requests", "surprise")


@cache
def make_plan(case: str):
    """Solve a case, once."""
    dp_size, settings = CASES[case]
    return solve(random_trace(0), Topology(ep_size=4, dp_size=dp_size, num_nodes=2), settings)


def saved(case: str, path: Path) -> Path:
    save_plan(make_plan(case), path / "plan")
    return path / "plan"


def assert_same(one, other) -> None:
    """Nested dataclasses of arrays and values are equal, dtypes too."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def test_fixed_copies_are_kept_and_checked(tmp_path):
    plan = make_plan("request map and scores")
    for fixed in (np.ones((3, 4, 8), bool), None):
        one = replace(plan, placement=replace(plan.placement, fixed_copies=fixed))
        save_plan(one, tmp_path / "plan")
        assert_same(asdict(load_plan(tmp_path / "plan")), asdict(one))
    for wrong, message in [((3, 4, 7), "has shape"), ((3, 3, 8), "has shape")]:
        with pytest.raises(ValueError, match=f"fixed_copies {message}"):
            replace(plan.placement, fixed_copies=np.ones(wrong, bool))
    save_plan(
        replace(plan, placement=replace(plan.placement, fixed_copies=np.ones((3, 4, 8), bool))), tmp_path / "plan"
    )
    edit_arrays(tmp_path / "plan/plan.safetensors", fixed_copies=np.ones((3, 4, 8), np.uint8))
    refuses(tmp_path / "plan", "fixed_copies has type uint8, expected bool")


@pytest.mark.parametrize("case", CASES)
def test_a_saved_plan_reads_back_the_same(tmp_path, case):
    plan = replace(make_plan(case), expected={"lar": 0.5, "requests": 3})
    save_plan(plan, tmp_path / "plan")
    assert_same(asdict(load_plan(tmp_path / "plan")), asdict(plan))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["plan", "plan.json", "plan.safetensors"]


@pytest.mark.parametrize("case", CASES)
def test_the_same_input_gives_the_same_bytes(tmp_path, case):
    path = saved(case, tmp_path / "one")
    save_plan(make_plan.__wrapped__(case), tmp_path / "two")
    for name in ("plan.json", "plan.safetensors"):
        assert (path / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_bytes_do_not_depend_on_the_process(tmp_path):
    """This one and another, whose hashes of strings differ."""
    code = "import sys; from pathlib import Path; from test_plan import saved; saved('hybrid', Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    words = [sys.executable, "-c", code, tmp_path / "other"]
    subprocess.run(words, check=True, env=environment, cwd=Path(__file__).parent)
    path = saved("hybrid", tmp_path / "own")
    for name in ("plan.json", "plan.safetensors"):
        assert (path / name).read_bytes() == (tmp_path / "other/plan" / name).read_bytes()


def edit_arrays(path: Path, **changes) -> None:
    """A change to None takes the array out."""
    arrays = load_file(path) | changes
    save_file({name: array for name, array in arrays.items() if array is not None}, path)


def refuses_arrays(mode, folder, changes, message):
    """A saved plan whose arrays were changed is refused, by what is wrong and by its path."""
    path, policy = saved(mode, folder), "tokens" if mode in ("tp", "scores") else "requests"
    changes = {name if name in UNPREFIXED else f"{policy}.{name}": array for name, array in changes.items()}
    edit_arrays(path / "plan.safetensors", **changes)
    refuses(path, message)


def refuses_header(mode, folder, changes, message):
    """A saved plan whose header was changed is refused, by what is wrong and by its path."""
    path = saved(mode, folder)
    edit_json(path / "plan.json", **changes)
    refuses(path, message)


def refuses(path, message):
    with pytest.raises(ValueError, match=message) as error:
        load_plan(path)
    assert str(path) in str(error.value)


def edit_json(path: Path, **changes) -> None:
    """A key such as `topology__dp_size` is set inside an object."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        if inner:
            content[outer][inner] = value
        else:
            content[outer] = value
    path.write_text(json.dumps(content))


def test_hashes_of_requests_are_bounded_and_checked(tmp_path, monkeypatch):
    path = saved("tp", tmp_path)
    edit_arrays(path / "plan.safetensors", profiled_requests=np.zeros(3, np.int64))
    refuses(path, "profiled_requests has type int64, expected uint64")
    edit_arrays(path / "plan.safetensors", profiled_requests=np.zeros((3, 2), np.uint64))
    refuses(path, "profiled_requests has shape")
    edit_arrays(path / "plan.safetensors", profiled_requests=np.zeros(3, np.uint64))
    assert load_plan(path).profiled_requests.tolist() == [0] * 3
    monkeypatch.setattr(plan_module, "MOST_REQUESTS", 2)
    refuses(path, "profiled_requests holds more than 2 hashes")


def test_a_plan_without_hashes_of_requests_loads(tmp_path):
    path = saved("tp", tmp_path)
    edit_arrays(path / "plan.safetensors", profiled_requests=None)
    edit_json(path / "plan.json", profiled_requests=False)
    assert load_plan(path).profiled_requests is None


def test_a_plan_of_an_older_schema_is_refused_with_how_to_make_it_again(tmp_path):
    path = saved("tp", tmp_path)
    header = json.loads((path / "plan.json").read_text())
    older = {name: value for name, value in header.items() if name not in ("tokens", "requests")}
    (path / "plan.json").write_text(json.dumps(older | {"schema_version": 1, "lookback": 2, "schedules_data": True}))
    refuses(path, "has schema version 1, and this semmoe reads 3: make it again with `semmoe solve`")


def test_a_plan_states_from_how_many_rows_on_a_pass_is_shuffled(tmp_path):
    path = saved("tp", tmp_path)
    assert load_plan(path).shuffle_from == 1
    save_plan(replace(load_plan(path), shuffle_from=NEVER), path)
    assert load_plan(path).shuffle_from == NEVER


def ranks(value: int) -> np.ndarray:
    return np.full((3, 1, 21), value, np.int16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"physical_to_logical_map": np.zeros((3, 8), np.int32)}, "is on no rank"),
        (
            {"physical_to_logical_map": np.full((3, 8), 8, np.int32)},
            "physical_to_logical_map holds a value outside 0 to 7",
        ),
        (
            {"physical_to_logical_map": np.full((3, 8), -1, np.int32)},
            "physical_to_logical_map holds a value outside 0 to 7",
        ),
        (
            {"physical_to_logical_map": np.tile(np.arange(8, dtype=np.int32), (2, 1))},
            "physical_to_logical_map has shape",
        ),
        ({"physical_to_logical_map": np.arange(8, dtype=np.int32)}, "physical_to_logical_map has shape"),
        ({"physical_to_logical_map": np.tile(np.arange(10, dtype=np.int32) % 8, (3, 1))}, "does not divide 10"),
        ({"token_ranks": ranks(4)}, "token_ranks holds a value outside 0 to 3"),
        ({"token_ranks": ranks(-1)}, "token_ranks holds a value outside 0 to 3"),
        ({"token_ranks": ranks(0)[:, :, 1:]}, "token_ranks has shape"),
        ({"path_ranks": np.full((3, 1, 16), 4, np.int16)}, "path_ranks holds a value outside 0 to 3"),
        ({"path_ranks": np.zeros((3, 1, 4), np.int16)}, "path_ranks has shape"),
        ({"path_confidence": np.zeros((3, 2, 16), np.float16)}, "path_confidence has shape"),
        ({"token_source": np.zeros(20, np.uint8)}, "token_source has shape"),
        ({"token_source": None}, r"plan\.safetensors holds"),
        ({"surprise": np.zeros(1)}, "surprise"),
    ],
)
def test_tampered_arrays_are_refused(tmp_path, changes, message):
    refuses_arrays("tp", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"physical_to_logical_map": np.array(3, np.int32)}, r"physical_to_logical_map has shape \(\)"),
        ({"physical_to_logical_map": np.tile(np.arange(8.0), (3, 1))}, "type float64, expected int32"),
        ({"physical_to_logical_map": np.tile(np.arange(8), (3, 1))}, "type int64, expected int32"),
        ({"token_ranks": np.full((3, 1, 21), 0.5)}, "token_ranks has type float64, expected int16"),
        ({"path_ranks": np.zeros((3, 1, 16), np.uint16)}, "path_ranks has type uint16, expected int16"),
        ({"token_confidence": ranks(0)}, "token_confidence has type int16, expected float16"),
        (
            {"token_confidence": np.full((3, 1, 21), np.nan, np.float16)},
            "token_confidence holds a value outside 0 to 1",
        ),
        ({"token_confidence": np.full((3, 1, 21), -0.5, np.float16)}, "token_confidence holds a value outside 0 to 1"),
        ({"path_confidence": np.full((3, 1, 16), np.inf, np.float16)}, "path_confidence holds a value outside 0 to 1"),
        ({"path_confidence": np.full((3, 1, 16), 1.5, np.float16)}, "path_confidence holds a value outside 0 to 1"),
        ({"token_source": np.full(21, 9, np.uint8)}, "token_source holds a value outside 0 to 2"),
        ({"token_source": np.zeros(21, np.int8)}, "token_source has type int8, expected uint8"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, changes, message):
    refuses_arrays("tp", tmp_path, changes, message)


def test_a_type_that_numpy_lacks_is_refused_by_name(tmp_path):
    path = saved("tp", tmp_path)
    content = (path / "plan.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"F16"', b'"BF16"')
    (path / "plan.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(ValueError, match=r"plan\.safetensors"):
        load_plan(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_scores": np.zeros((21, 3), np.float32)}, "request_scores has shape"),
        ({"request_scores": np.zeros((21, 4))}, "request_scores has type float64, expected float32"),
        ({"request_scores": np.full((21, 4), np.nan, np.float32)}, "request_scores holds a value outside 0 to 1"),
        ({"request_scores": np.full((21, 4), 1.5, np.float32)}, "request_scores holds a value outside 0 to 1"),
        ({"request_source": np.full(21, 3, np.uint8)}, "request_source holds a value outside 0 to 2"),
        ({"request_source": np.zeros(20, np.uint8)}, "request_source has shape"),
        ({"request_source": None}, r"plan\.safetensors holds"),
        ({"token_source": np.zeros(21, np.uint8)}, r"plan\.safetensors holds"),
    ],
)
def test_tampered_request_tables_are_refused(tmp_path, changes, message):
    refuses_arrays("dp", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, "surprise"),
        ({"topology__surprise": 1}, "surprise"),
        ({"fingerprint__surprise": 1}, "surprise"),
        ({"schema_version": 4}, "schema version 4, and this semmoe reads 3"),
        ({"method": 3}, "method"),
        ({"shuffle_from": 0}, "shuffle_from must lie between 1 and 2,147,483,648, not 0"),
        ({"shuffle_from": (1 << 31) + 1}, "shuffle_from must lie between 1 and 2,147,483,648"),
        ({"shuffle_from": "never"}, "shuffle_from"),
        ({"topology__dp_size": 3}, "dp_size 3 does not divide"),
        ({"topology__ep_size": "4"}, "ep_size"),
        ({"topology__dp_size": 4, "topology__attn_tp_size": 1}, "1 groups of requests do not fit dp_size 4"),
        ({"tokens__kind": "by-luck"}, "tokens are of kind 'by-luck', and this semmoe knows by-position"),
        ({"tokens__kind": ["paper-tables"]}, "tokens are of kind"),
        ({"tokens__kind": "by-position"}, "tokens of kind by-position have missing or unknown numbers: lookback"),
        ({"tokens": {"kind": "by-position"}}, "safetensors holds"),
        ({"tokens": {}}, "tokens are of kind None"),
        (
            {"requests": {"kind": "round-robin"}},
            "kind round-robin have missing or unknown numbers: num_groups",
        ),
        ({"requests__num_groups": 2}, "2 groups of requests do not fit dp_size 1"),
        ({"tokens__lookback": 3}, "path_ranks has shape|path_confidence has shape"),
        ({"tokens__lookback": None}, "lookback of tokens must be int, not None"),
        ({"tokens__lookback": 2.0}, "lookback of tokens must be int, not 2.0"),
        ({"tokens__lookback": True}, "lookback of tokens must be int, not True"),
        ({"tokens__lookback": -1}, "lookback must lie between 1 and 20, not -1"),
        ({"tokens__lookback": 0}, "lookback must lie between 1 and 20, not 0"),
        ({"tokens__lookback": 11}, "lookback 11 is out of range"),
        ({"tokens__lookback": 1 << 40}, "lookback must lie between 1 and 20, not 1099511627776"),
        ({"tokens__ordered": 0}, "tokens of kind paper-tables have missing or unknown numbers: ordered"),
        ({"static_dispatch": True}, "safetensors holds"),
        ({"fixed_copies": True}, "safetensors holds"),
        ({"fingerprint__top_k": 0}, "top_k must lie between 1 and"),
        ({"fingerprint__num_groups": 3}, "3 gate groups do not divide 8 experts"),
        ({"fingerprint__vocab_size": 21}, "has shape"),
        ({"fingerprint__num_experts": 9}, "8 physical experts cannot hold 9 experts"),
    ],
)
def test_a_tampered_header_is_refused(tmp_path, changes, message):
    refuses_header("tp", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_rows": np.full(21, 99, np.int32)}, "token_rows holds a value outside 0 to"),
        ({"token_rows": np.full(21, -1, np.int32)}, "token_rows holds a value outside 0 to"),
        ({"token_rows": np.zeros(20, np.int32)}, r"token_rows has shape \(20,\), expected \(21,\)"),
        ({"token_rows": np.zeros(21, np.int64)}, "token_rows has type int64, expected int32"),
        ({"token_scores": np.zeros((3, 0, 4), np.int8)}, "token_rows holds a value outside 0 to -1"),
        ({"token_scores": np.zeros((3, 4), np.int8)}, "token_scores has shape|token_rows holds"),
        ({"token_scores": np.zeros((2, 21, 4), np.int8)}, r"token_scores has shape \(2, 21, 4\)"),
        ({"token_scores": np.zeros((3, 21, 3), np.int8)}, r"token_scores has shape \(3, 21, 3\)"),
        ({"token_scores": np.full((3, 21, 4), -128, np.int8)}, "token_scores holds a value outside -127 to 127"),
        ({"token_scores": np.zeros((3, 21, 4), np.int16)}, "token_scores has type int16, expected int8"),
        ({"token_shift": np.full(3, 16, np.uint8)}, "token_shift holds a value outside 0 to 15"),
        ({"token_shift": np.zeros(2, np.uint8)}, "token_shift has shape"),
        ({"token_source": np.full(21, 3, np.uint8)}, "token_source holds a value outside 0 to 2"),
        ({"path_scores": np.zeros((3, 1, 4), np.int16)}, r"path_scores has shape \(3, 1, 4\)"),
        ({"path_scores": np.zeros((3, 0, 4), np.int16)}, r"path_scores has shape \(3, 0, 4\)"),
        ({"path_scores": None}, r"plan\.safetensors holds"),
        ({"history_scores": np.zeros((3, 16, 4), np.int16)}, r"history_scores has shape \(3, 16, 4\), expected"),
        ({"history_scores": np.full((3, 17, 4), -32768, np.int16)}, "history_scores holds a value outside -32767"),
        ({"history_scores": np.zeros((3, 17, 4), np.float32)}, "history_scores has type float32, expected int16"),
        ({"static_dispatch": np.full((3, 4, 8), 4, np.int16)}, "static_dispatch holds a value outside 0 to 3"),
        ({"static_dispatch": np.full((3, 4, 8), -1, np.int16)}, "static_dispatch holds a value outside 0 to 3"),
        ({"static_dispatch": np.zeros((3, 4, 8), np.int16)}, "sends an expert to a rank that does not host it"),
        ({"static_dispatch": np.zeros((3, 3, 8), np.int16)}, "static_dispatch has shape"),
        ({"static_dispatch": np.zeros((3, 4, 8), np.int32)}, "static_dispatch has type int32, expected int16"),
        ({"static_dispatch": None}, r"plan\.safetensors holds"),
        ({"token_ranks": np.zeros((3, 1, 21), np.int16)}, r"plan\.safetensors holds"),
    ],
)
def test_tampered_score_tables_are_refused(tmp_path, changes, message):
    refuses_arrays("scores", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens__lookback": None}, "lookback of tokens must be int, not None"),
        ({"tokens__lookback": 1, "tokens__ordered": 0}, r"path_scores has shape .*, expected \(3, 8, 4\)"),
        ({"tokens__lookback": 3, "tokens__ordered": 3}, r"path_scores has shape .*, expected \(3, 48, 4\)"),
        ({"tokens__lookback": -1}, "lookback must lie between 0 and 1,024, not -1"),
        ({"tokens__lookback": 4}, "lookback 4 with . ordered is out of range"),
        ({"tokens__lookback": 1 << 40}, "lookback must lie between 0 and 1,024, not 1099511627776"),
        ({"tokens__ordered": 3}, "lookback 2 with 3 ordered is out of range"),
        ({"tokens__ordered": -1}, "ordered must lie between 0 and 1,024, not -1"),
        ({"tokens__ordered": None}, "ordered of tokens must be int, not None"),
        ({"tokens__ordered": 0.5}, "ordered of tokens must be int, not 0.5"),
        ({"static_dispatch": False}, r"plan\.safetensors holds"),
        ({"static_dispatch": "yes"}, "static_dispatch"),
        ({"requests": 3}, "requests"),
        ({"fingerprint__top_k": 3, "tokens__ordered": 2}, r"path_scores has shape .*, expected \(3, 48, 4\)"),
    ],
)
def test_a_tampered_header_of_score_tables_is_refused(tmp_path, changes, message):
    refuses_header("scores", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_scores": np.zeros((21, 3), np.float32)}, "token_scores has shape"),
        ({"token_scores": np.zeros((20, 4), np.float32)}, "token_scores has shape"),
        ({"token_scores": np.zeros((21, 4))}, "token_scores has type float64, expected float32"),
        ({"token_scores": np.full((21, 4), np.nan, np.float32)}, "token_scores holds a value outside"),
        ({"token_weights": np.full(21, -1, np.float32)}, "token_weights holds a value outside 0 to"),
        ({"token_weights": np.full(21, np.inf, np.float32)}, "token_weights holds a value outside 0 to"),
        ({"token_weights": np.zeros(20, np.float32)}, "token_weights has shape"),
        ({"bias": np.full(4, np.nan, np.float32)}, "bias holds a value outside"),
        ({"bias": np.zeros(5, np.float32)}, "bias has shape"),
        ({"prices": np.full(4, -np.inf, np.float32)}, "prices holds a value outside"),
        ({"prices": np.zeros((4, 1), np.float32)}, "prices has shape"),
        ({"prices": None}, r"plan\.safetensors holds"),
        ({"request_scores": np.zeros((21, 4), np.float32)}, r"plan\.safetensors holds"),
    ],
)
def test_a_tampered_request_map_is_refused(tmp_path, changes, message):
    refuses_arrays("request map", tmp_path, changes, message)


def test_a_map_of_requests_is_no_table_of_their_tokens(tmp_path):
    numbers = {"kind": "prompt-scores", "score_spread": 0.1, "mean_length": 3.0}
    refuses_header("dp", tmp_path, {"requests": numbers}, r"plan\.safetensors holds")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": {"kind": "paper-table"}}, r"plan\.safetensors holds"),
        ({"requests": {}}, "requests are of kind None"),
        (
            {"requests": {"kind": "prompt-scores", "score_spread": 0.1}},
            "have missing or unknown numbers: mean_length",
        ),
        ({"requests__surprise": 1.0}, "surprise"),
        ({"requests__score_spread": -0.1}, "score_spread must lie between 0 and 1, not -0.1"),
        ({"requests__score_spread": 1.5}, "score_spread must lie between 0 and 1, not 1.5"),
        ({"requests__score_spread": float("nan")}, "score_spread must lie between"),
        ({"requests__mean_length": 0.0}, "mean_length must lie between"),
        ({"requests__mean_length": float("inf")}, "mean_length must lie between"),
        ({"requests__mean_length": "long"}, "mean_length of requests must be float, not 'long'"),
    ],
)
def test_a_request_map_s_numbers_are_checked(tmp_path, changes, message):
    refuses_header("request map", tmp_path, changes, message)


def test_a_damaged_or_missing_file_is_named(tmp_path):
    path = saved("tp", tmp_path)
    tables = path / "plan.safetensors"
    tables.write_bytes(tables.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"plan\.safetensors is truncated or damaged"):
        load_plan(path)
    tables.unlink()
    with pytest.raises(ValueError, match=r"plan\.safetensors is missing"):
        load_plan(path)
    (path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is not valid"):
        load_plan(path)
    with pytest.raises(ValueError, match="no plan at"):
        load_plan(tmp_path / "absent")


def test_a_plan_for_another_model_is_refused_by_name(tmp_path):
    plan = load_plan(saved("tp", tmp_path))
    plan.check(random_trace(5).fingerprint)
    with pytest.raises(ValueError, match=r"num_experts is 8 there \(toy\) and 16 here \(bigger\)"):
        plan.check(replace(plan.fingerprint, model="bigger", num_experts=16))
    with pytest.raises(ValueError, match="num_experts is 8 there and 16 here"):  # a name twice would say nothing
        plan.check(replace(plan.fingerprint, num_experts=16))


def test_an_older_plan_is_replaced(tmp_path):
    path = saved("tp", tmp_path)
    save_plan(make_plan("linear"), path)
    assert load_plan(path).method == "linear"
    assert [each.name for each in tmp_path.iterdir()] == ["plan"]


def test_what_is_not_a_plan_is_left_alone(tmp_path):
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name, message in (
        ("plan", r"holds other files than a plan's \(thesis\.txt\)"),
        ("file", "is a file: name a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            save_plan(make_plan("linear"), tmp_path / name)
    assert (tmp_path / "plan" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "more work"


def test_a_plan_beside_other_files_is_left_alone(tmp_path):
    path = saved("tp", tmp_path)
    (path / "notes.txt").write_text("years of work")
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    with pytest.raises(ValueError, match=r"holds other files than a plan's \(notes\.txt\)"):
        save_plan(make_plan("linear"), path)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["plan"]


def test_an_empty_directory_may_become_a_plan(tmp_path):
    save_plan(make_plan("linear"), tmp_path)
    assert load_plan(tmp_path).method == "linear"


@pytest.mark.parametrize("failing", ["save_arrays", "save_json"])
@pytest.mark.parametrize("older", [True, False])
def test_a_full_disk_leaves_the_older_plan_and_nothing_else(tmp_path, monkeypatch, failing, older):
    if older:
        before = (saved("tp", tmp_path) / "plan.json").read_bytes()

    def full(path, content):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_module, failing, full)
    with pytest.raises(OSError, match="No space left"):
        save_plan(make_plan("linear"), tmp_path / "plan")
    assert [path.name for path in tmp_path.iterdir()] == (["plan"] if older else [])
    if older:
        assert load_plan(tmp_path / "plan").method == "paper"
        assert (tmp_path / "plan" / "plan.json").read_bytes() == before
