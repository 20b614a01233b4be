"""The nouns refuse what is inconsistent, and the package stays light."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_fingerprint, make_trace, random_trace

import semmoe
from semmoe.core import Placement, Plan, RoutingTrace
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology, physical_experts


@pytest.mark.parametrize(
    ("attention", "dp_size", "expected"),
    [("tp", None, (1, 8)), ("dp", None, (8, 1)), ("dp", 8, (8, 1)), ("hybrid", 2, (2, 4))],
)
def test_topology_divides_ranks_into_attention_groups(attention, dp_size, expected):
    topology = Topology.for_attention(attention, 8, dp_size)
    assert (topology.dp_size, topology.attn_tp_size) == expected
    assert topology.attention == attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ep_size": 0}, "ep_size must lie between 1 and 4,096, not 0"),
        ({"ep_size": 8, "dp_size": 3}, r"dp_size 3 does not divide ep_size 8 \(nearest: 2 and 4\)"),
        ({"ep_size": 8, "dp_size": 9}, r"dp_size 9 does not divide ep_size 8 \(nearest: 8\)"),
        ({"ep_size": 8, "dp_size": 2, "attn_tp_size": 2}, r"is 4, not ep_size 8 \(attn_tp_size 4 fits\)"),
        ({"ep_size": 16, "num_nodes": 3}, r"num_nodes 3 does not divide ep_size 16 \(nearest: 2 and 4\)"),
        ({"ep_size": 8, "num_nodes": 0}, "num_nodes must lie between 1 and"),
    ],
)
def test_topology_refuses_sizes_that_do_not_multiply(arguments, message):
    with pytest.raises(ValueError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize(
    ("redundant", "ep_size", "message"),
    [
        (0, 3, r"3 does not divide 8 experts \(nearest: 2 and 4\); redundant experts that fit: 1"),
        (0, 16, r"16 does not divide 8 experts \(nearest: 8\); redundant experts that fit: 8"),
        (3, 4, r"4 does not divide 11 experts \(3 redundant\) \(nearest: 1 and 11\); .* that fit: 0 and 4"),
        (5, 4, r"nearest: 1 and 13\); redundant experts that fit: 4 and 8"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_with_the_sizes_that_fit(redundant, ep_size, message):
    with pytest.raises(ValueError, match=message):
        physical_experts(8, redundant, ep_size)


@pytest.mark.parametrize(
    ("attention", "dp_size"), [("tp", 2), ("dp", 2), ("hybrid", None), ("hybrid", 1), ("hybrid", 8), ("ep", None)]
)
def test_topology_refuses_a_group_number_that_contradicts_the_attention(attention, dp_size):
    with pytest.raises(ValueError, match="attention"):
        Topology.for_attention(attention, 8, dp_size)


def test_fingerprints_differ_in_anything_but_the_name():
    mine = make_fingerprint()
    mine.check_same(replace(mine, model="renamed"), "t:")
    for size in ("hidden_size", "expert_size"):
        known, unknown = (replace(mine, **{size: value}) for value in (64, 0))  # 0: not known
        known.check_same(unknown, "t:")
        unknown.check_same(known, "t:")
        with pytest.raises(ValueError, match=f"^t: {size} is 64 there and 32 here"):
            known.check_same(replace(mine, **{size: 32}), "t:")
    for field, value in (("architecture_hash", "b"), ("tokenizer_hash", "u"), ("num_experts", 5), ("num_groups", 2)):
        with pytest.raises(ValueError, match=f"^t: {field} is"):
            mine.check_same(replace(mine, **{field: value}), "t:")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, f"{name} must lie between 1 and .*, not 0")
            for name in ("vocab_size", "num_layers", "num_experts")
        ),
        *(({name: -1}, f"{name} must lie between 1 and .*, not -1") for name in ("top_k", "num_groups")),
        ({"top_k": 5}, "top_k 5 exceeds 4 experts"),
        ({"num_groups": 3}, "3 gate groups do not divide 4 experts"),
        ({"num_groups": 8}, "8 gate groups do not divide 4 experts"),
    ],
)
def test_fingerprint_refuses_a_model_that_cannot_be(changes, message):
    make_fingerprint(top_k=4, num_groups=4)
    with pytest.raises(ValueError, match=message):
        make_fingerprint(**changes)


def hand_trace() -> RoutingTrace:
    experts = [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]], [[3, 2], [1, 0]], [[0, 2], [1, 3]]]
    return make_trace([[5, 4], [], [3, 2, 1]], experts, prompts=[[0], [1, 2], [3]])


def test_trace_knows_its_requests():
    trace = hand_trace()
    assert (trace.num_tokens, trace.num_requests) == (5, 3)
    assert trace.request_of_token().tolist() == [0, 0, 2, 2, 2]
    assert [trace.prompt(r).tolist() for r in range(3)] == [[0], [1, 2], [3]]


def test_select_takes_requests_in_the_order_given():
    chosen = hand_trace().select(np.array([2, 1, 0]))
    assert chosen.token_ids.tolist() == [3, 2, 1, 5, 4]
    assert chosen.request_offsets.tolist() == [0, 3, 3, 5]
    assert chosen.prompt_ids.tolist() == [3, 1, 2, 0]
    assert chosen.expert_ids[0].tolist() == [[2, 3], [0, 1]]


@given(st.integers(0, 5), st.data())
def test_select_agrees_with_slicing_request_by_request(seed, data):
    trace = random_trace(seed, requests=6)
    chosen = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    rows = [range(trace.request_offsets[r], trace.request_offsets[r + 1]) for r in chosen]
    flat = [t for each in rows for t in each]
    part = trace.select(np.array(chosen))
    np.testing.assert_array_equal(part.token_ids, trace.token_ids[flat])
    np.testing.assert_array_equal(part.expert_ids, trace.expert_ids[flat])
    np.testing.assert_array_equal(np.diff(part.request_offsets), [len(each) for each in rows])
    assert [part.prompt(i).tolist() for i in range(len(chosen))] == [trace.prompt(r).tolist() for r in chosen]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_offsets": np.array([0, 3, 2, 5])}, "request_offsets must rise from 0 to 5"),
        ({"request_offsets": np.array([1, 2, 2, 5])}, "request_offsets must rise"),
        ({"request_offsets": np.array([0, 2, 2, 4])}, "request_offsets must rise"),
        ({"request_offsets": np.array(5)}, "request_offsets must rise"),
        ({"request_offsets": np.array([[0, 5]])}, "request_offsets must rise"),
        ({"prompt_offsets": np.array([0, 1, 4])}, "differ in number"),
        ({"prompt_offsets": np.array([0, 1, 3, 5])}, "prompt_offsets must rise from 0 to 4"),
        ({"token_ids": np.array([5, 4, 3, 2, 6])}, "token id 6 is out of range for 6"),
        ({"token_ids": np.array([5, 4, -1, 2, 0])}, "token id -1 is out of range"),
        ({"prompt_ids": np.array([0, 1, 2, 9])}, "prompt token id 9 is out of range"),
        ({"phase": np.zeros(4, np.uint8)}, "phase has shape"),
        ({"expert_ids": np.zeros((5, 2, 3), np.uint8)}, "expert_ids has shape"),
        ({"expert_ids": np.full((5, 2, 2), 4, np.uint8)}, "expert id 4 is out of range for 4 experts"),
        ({"expert_ids": np.full((5, 2, 2), -1, np.int16)}, "expert id -1 is out of range"),
        ({"expert_ids": np.full((5, 2, 2), 0.5)}, "expert ids are float64, expected integers"),
        ({"token_ids": np.zeros(5)}, "token ids are float64, expected integers"),
        ({"prompt_ids": np.zeros(4, bool)}, "prompt token ids are bool, expected integers"),
    ],
)
def test_trace_refuses_arrays_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        replace(hand_trace(), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.array([5, 4, 3, 2, 0], np.int32)},
        {"expert_ids": np.zeros((5, 2, 2), np.uint8)},
        {"request_offsets": np.array([0, 1, 2, 5])},
        {"phase": np.zeros(5, np.uint8)},
        {"prompt_ids": np.array([0, 1, 2, 5], np.int32)},
        {"prompt_offsets": np.array([0, 2, 3, 4])},
    ],
)
def test_digest_sees_every_array(change):
    trace = hand_trace()
    assert replace(trace, **change).digest() != trace.digest() == hand_trace().digest()


def test_a_request_s_hash_tells_its_prompt_from_its_routed_tokens():
    """The same ids, of which one more or less belongs to the prompt, and other ids in one place."""

    def hashed(prompt, routed):
        experts = np.zeros((len(routed), 1, 1))
        return make_trace([routed], experts, [prompt], num_experts=1, vocab_size=9).request_hashes()[0]

    hashes = [hashed([1, 2], [3, 4]), hashed([1, 2, 3], [4]), hashed([1], [2, 3, 4]), hashed([1, 2], [3, 5])]
    assert len(set(hashes)) == 4
    assert hashed([1, 2], [3, 4]) == hashes[0]


def test_a_dispatch_that_is_wrong_in_one_place_is_refused():
    rows, right = np.array([[0, 1, 2, 1]]), np.array([[[0, 0, 1], [0, 1, 1]]], np.int16)
    Placement(physical_to_logical_map=rows, num_experts=3, ep_size=2, static_dispatch=right)
    for source, expert in ((0, 2), (1, 0)):
        wrong = right.copy()
        wrong[0, source, expert] ^= 1
        with pytest.raises(ValueError, match="a rank that does not host it"):
            Placement(physical_to_logical_map=rows, num_experts=3, ep_size=2, static_dispatch=wrong)


def test_placement_with_a_copied_expert():
    placement = Placement(physical_to_logical_map=np.array([[1, 0, 2, 1]], np.int32), num_experts=3, ep_size=2)
    assert [*range(placement.experts_per_rank)] == [0, 1]
    assert placement.redundant_experts == 1
    assert placement.logical_replica_count.tolist() == [[1, 2, 1]]
    assert placement.logical_to_physical_map.tolist() == [[[1, -1], [0, 3], [2, -1]]]
    assert placement.hosts.tolist() == [[[True, True, False], [False, True, True]]]


@given(st.integers(0, 999), st.sampled_from([1, 2, 4]), st.integers(0, 2))
def test_placement_maps_invert_each_other(seed, ep_size, copies_per_rank):
    rng = np.random.default_rng(seed)
    extra = rng.integers(8, size=(3, copies_per_rank * ep_size))
    maps = rng.permuted(np.hstack([np.tile(np.arange(8), (3, 1)), extra]), axis=1).astype(np.int32)
    placement = Placement(physical_to_logical_map=maps, num_experts=8, ep_size=ep_size)
    for l in range(3):
        for e in range(8):
            copies = [p for p in placement.logical_to_physical_map[l, e] if p >= 0]
            assert copies == [p for p in range(maps.shape[1]) if maps[l, p] == e]
            assert placement.logical_replica_count[l, e] == len(copies)
            hosts = {p // placement.experts_per_rank for p in copies}
            assert set(np.flatnonzero(placement.hosts[l, :, e])) == hosts


def test_labels_become_a_placement_with_experts_in_ascending_order():
    placement = Placement.from_labels(np.array([[1, 0, 1, 0], [0, 0, 1, 1]]), 2)
    assert placement.physical_to_logical_map.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_labels_with_unequal_ranks_are_our_own_mistake():
    with pytest.raises(AssertionError, match="equally many"):
        Placement.from_labels(np.array([[0, 0, 0, 1]]), 2)


@pytest.mark.parametrize(
    ("row", "ep_size", "message"),
    [
        ([0, 1, 1, 0], 2, r"^expert 2 of layer 0 is on no rank$"),
        ([0, 1, 2], 2, "ep_size 2 does not divide 3"),
        ([0, 1, 2, 3], 2, "expert id 3 is out of range"),
    ],
)
def test_placement_refuses_a_map_that_cannot_serve(row, ep_size, message):
    with pytest.raises(ValueError, match=message):
        Placement(physical_to_logical_map=np.array([row], np.int32), num_experts=3, ep_size=ep_size)


def test_plan_is_refused_on_another_model():
    placement = Placement(physical_to_logical_map=np.array([[0, 1]], np.int32), num_experts=2, ep_size=2)
    mine = make_fingerprint(num_layers=1, num_experts=2)
    plan = Plan(
        topology=Topology(ep_size=2),
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=mine,
        method="linear",
    )
    plan.check(replace(mine, model="a copy elsewhere"))
    with pytest.raises(ValueError, match="tokenizer_hash is t there \\(toy\\) and other here \\(theirs\\)"):
        plan.check(replace(mine, model="theirs", tokenizer_hash="other"))


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_no_engine_and_no_compiler():
    heavy = "{'torch', 'transformers', 'numba'}"
    assert run_python(f"import sys, semmoe; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_public_names_resolve_without_an_engine():
    code = (
        "import sys, semmoe; found = [getattr(semmoe, name).__name__ for name in semmoe.__all__]; "
        "print(found, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == f"{list(semmoe.__all__)} []"


def test_importing_the_package_takes_little_longer_than_numpy():
    code = (
        "from time import perf_counter; import numpy; start = perf_counter(); "
        "import semmoe; print(perf_counter() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = semmoe.nonsense


def test_an_expert_without_a_rank_is_named_by_its_numbers():
    rows = np.array([[0, 1, 2, 3], [0, 1, 2, 2]], np.int32)
    with pytest.raises(ValueError, match=r"^expert 3 of layer 1 is on no rank$"):
        Placement(physical_to_logical_map=rows, num_experts=4, ep_size=2)
