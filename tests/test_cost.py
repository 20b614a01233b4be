"""Predicted times by hand, against loops and against published measurements; and what the verdict says."""

import json
from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.costs import timing
from semmoe.costs.links import Experts, Links, PairSpeeds, Tier, load_links, row_costs, seconds_per_gigabyte, shipped
from semmoe.costs.metrics import uniform_remote_ranks
from semmoe.costs.timing import LayerShape, LayerTime, Prediction
from semmoe.topology import Topology

# Rows of 1,000 bytes each way, no latency, 1 GB/s.
KILOBYTE = LayerShape(hidden_size=1000, expert_size=10, top_k=2)
TIER = Tier(
    dispatch_latency_us=0, combine_latency_us=0, gigabytes_per_second=1, all_reduce_latency_us=0,
    all_reduce_gigabytes_per_second=1,
)  # fmt: skip
BETWEEN = TIER.model_copy(
    update={"dispatch_latency_us": 7, "combine_latency_us": 9, "all_reduce_latency_us": 11, "gigabytes_per_second": 0.5,
            "all_reduce_gigabytes_per_second": 0.25}
)  # fmt: skip
LINKS = Links(
    name="by hand", kind="nominal", source="", inside_node=TIER, dispatch_bytes_per_value=1, combine_bytes_per_value=1,
    routing_bytes=0, experts=Experts(fixed_us=5, teraflops=0.01),
)  # fmt: skip
TWO_NODES = LINKS.model_copy(update={"between_nodes": BETWEEN})


def links_with(**changes) -> Links:
    return LINKS.model_copy(update=changes)


def test_the_worked_example_of_the_module():
    rows = np.array([[0, 3000], [1000, 0]])
    time = timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=2), LINKS)
    assert (time.dispatch, time.combine) == pytest.approx((3e-3, 3e-3))
    shared = timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=2), links_with(shared=True))
    assert (shared.dispatch, shared.combine) == pytest.approx((4e-3, 4e-3))


def test_a_rank_that_receives_from_all_is_the_slowest():
    rows = np.array([[0, 2000, 0], [0, 0, 0], [0, 2000, 0]])
    assert timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=3), LINKS).dispatch == pytest.approx(4e-3)


def test_experts_take_a_fixed_time_and_six_operations_for_each_weight_of_the_busiest_rank():
    """60,000 operations a pair (hidden 1,000, width 10), 0.01 Tflop/s: 6 us a pair."""
    time = timing.layer_time(np.zeros((2, 2)), 10, KILOBYTE, Topology(ep_size=2), LINKS)
    assert time.experts == pytest.approx(65e-6)
    assert (time.communication, time.total) == pytest.approx((0, 65e-6))


def test_two_nodes_of_two_ranks_overlap_their_tiers():
    """Rank 0 sends 3 MB to its neighbour and 1 MB to each rank of the other node, at half the bandwidth: 3 and 4 ms."""
    rows = np.array([[9999, 3000, 1000, 1000], [0] * 4, [0] * 4, [0] * 4])
    time = timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=4, num_nodes=2), TWO_NODES)
    assert time.dispatch == pytest.approx(5e-3 + 7e-6)
    assert time.combine == pytest.approx(5e-3 + 9e-6)
    shared = timing.layer_time(
        rows, 0, KILOBYTE, Topology(ep_size=4, num_nodes=2), links_with(between_nodes=BETWEEN, shared=True)
    )
    assert shared.dispatch == pytest.approx(7e-3 + 7e-6)


def test_latency_grows_with_every_doubling_of_nodes():
    """8 nodes are three doublings; the rows take 1 MB at 0.5 GB/s."""
    rows = np.zeros((8, 8))
    rows[0, 7] = 1000
    time = timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=8, num_nodes=8), TWO_NODES)
    assert time.dispatch == pytest.approx(2e-3 + 3 * 7e-6)


SLOW_NODE = {"gigabytes_per_second": [[9.0, 2.0, 0.5], [2.0, 9.0, 0.5], [0.5, 0.5, 9.0]]}


def test_pairs_of_nodes_may_have_speeds_of_their_own():
    """Node 2 is slow. Rank 0 sends 1 MB to each other node: 0.5 ms and 2 ms; inside a node the tier decides."""
    links = links_with(between_nodes=BETWEEN, pairs=PairSpeeds(**SLOW_NODE))
    topology = Topology(ep_size=6, num_nodes=3)
    rows = np.zeros((6, 6))
    rows[0, [2, 4]] = 1000
    assert timing.layer_time(rows, 0, KILOBYTE, topology, links).dispatch == pytest.approx(2.5e-3 + np.log2(3) * 7e-6)
    seconds = seconds_per_gigabyte(links, topology)
    assert (seconds[0, 1], seconds[0, 2], seconds[0, 5]) == (1.0, 0.5, 2.0)
    costs = row_costs(links, topology)
    assert costs.rank[0].tolist() == [0, 2, 1, 1, 4, 4]


def test_pairs_of_ranks_replace_the_tiers_and_add_latency():
    pairs = PairSpeeds(gigabytes_per_second=[[1.0, 4.0], [2.0, 1.0]], latency_us=[[0.0, 3.0], [8.0, 0.0]])
    rows = np.array([[0, 1000], [1000, 0]])
    time = timing.layer_time(rows, 0, KILOBYTE, Topology(ep_size=2), links_with(pairs=pairs))
    assert time.dispatch == pytest.approx(0.5e-3 + 8e-6)


def test_pairs_of_other_sizes_are_refused():
    links = links_with(pairs=PairSpeeds(**SLOW_NODE))
    with pytest.raises(ValueError, match="speeds of 3 x 3 pairs, not of 4 ranks or 1 nodes"):
        seconds_per_gigabyte(links, Topology(ep_size=4))
    for rows in ([[1.0], [1.0]], [[1.0, 0.0], [1.0, 1.0]]):
        with pytest.raises(ValueError, match=r"not square|above 0"):
            PairSpeeds(gigabytes_per_second=rows)
    with pytest.raises(ValueError, match="different sizes"):
        PairSpeeds(gigabytes_per_second=[[1.0]], latency_us=[[1.0, 2.0], [1.0, 2.0]])


def test_bytes_count_hidden_states_both_ways_and_routing_one_way():
    links = links_with(dispatch_bytes_per_value=1, combine_bytes_per_value=2, routing_bytes=8)
    assert timing.dispatch_row_bytes(KILOBYTE, links) == 1000 + 2 * 8
    assert timing.combine_row_bytes(KILOBYTE, links) == 2000
    bytes_ = timing.all_to_all_bytes(np.array([[0, 3], [1, 0]]), KILOBYTE, links)
    assert bytes_.tolist() == [[0, 3 * 1016 + 1 * 2000], [1 * 1016 + 3 * 2000, 0]]


def test_an_all_reduce_by_hand():
    """100 rows of 1,000 bytes over 4 ranks: each sends 2 * 3/4 of 100 kB. On two nodes of two: 100 kB inside, then

    2 * 1/2 of half the rows, 50 kB, between nodes, at 0.25 GB/s.
    """
    one = timing.all_reduce_time(100, 10, KILOBYTE, Topology(ep_size=4), LINKS)
    assert one == LayerTime(0, pytest.approx(65e-6), 0, pytest.approx(150e-6))
    shared = timing.all_reduce_time(100, 10, KILOBYTE, Topology(ep_size=4), links_with(shared=True))
    assert shared.all_reduce == pytest.approx(600e-6)
    two = timing.all_reduce_time(100, 10, KILOBYTE, Topology(ep_size=4, num_nodes=2), TWO_NODES)
    assert two.all_reduce == pytest.approx(100e-6 + 200e-6 + 11e-6)
    apart = timing.all_reduce_time(100, 10, KILOBYTE, Topology(ep_size=2, num_nodes=2), TWO_NODES)
    assert apart.all_reduce == pytest.approx(400e-6 + 11e-6)


def test_one_rank_reduces_nothing():
    assert timing.all_reduce_time(100, 0, KILOBYTE, Topology(ep_size=1), LINKS).all_reduce == 0


def test_layers_are_predicted_one_by_one():
    """Rank 0 is busy in one layer and rank 1 in the other: averaged first they would seem balanced."""
    rows = np.array([[[0, 0, 2000], [0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 2000], [0, 0, 0]]])
    rows[1, 1] = [2000, 0, 0]
    found = timing.predict("m", rows, np.array([10, 30]), KILOBYTE, Topology(ep_size=3), LINKS)
    assert found.time == LayerTime(pytest.approx(2e-3), pytest.approx(125e-6), pytest.approx(2e-3), 0)
    assert found.rows.tolist() == [[0, 0, 1000], [1000, 0, 0], [0, 0, 0]]
    assert (found.method, found.busiest_pairs) == ("m", 20)


TOPOLOGIES = st.sampled_from([Topology(ep_size=g, num_nodes=n) for g, n in ((1, 1), (2, 1), (4, 1), (4, 2), (6, 3))])


def draw_rows(topology, seed) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50, (topology.ep_size,) * 2) * rng.integers(0, 2, (topology.ep_size,) * 2)


@given(TOPOLOGIES, st.integers(0, 9999), st.booleans())
def test_an_all_to_all_agrees_with_loops(topology, seed, shared):
    rows, links = draw_rows(topology, seed), TWO_NODES.model_copy(update={"shared": shared})
    time = timing.layer_time(rows, 0, KILOBYTE, topology, links)
    inside, between = links.inside_node, links.between_nodes
    assert time.dispatch == pytest.approx(
        oracles.exchange_seconds(rows * 1000, topology, [(0, inside.gigabytes_per_second), (7e-6, 0.5)], shared)
    )
    assert time.combine == pytest.approx(
        oracles.exchange_seconds(rows.T * 1000, topology, [(0, 1), (9e-6, between.gigabytes_per_second)], shared)
    )


@given(TOPOLOGIES, st.integers(0, 9999), st.integers(0, 9999), st.booleans())
def test_more_rows_or_pairs_are_never_faster(topology, seed, more, shared):
    links = TWO_NODES.model_copy(update={"shared": shared})
    rows = draw_rows(topology, seed)
    fewer = timing.layer_time(rows, 10, KILOBYTE, topology, links)
    time = timing.layer_time(rows + draw_rows(topology, more), 11, KILOBYTE, topology, links)
    assert time.dispatch >= fewer.dispatch
    assert time.combine >= fewer.combine
    assert time.experts > fewer.experts
    assert timing.all_reduce_time(11, 0, KILOBYTE, topology, links).total >= (
        timing.all_reduce_time(10, 0, KILOBYTE, topology, links).total
    )


@given(TOPOLOGIES)
def test_what_stays_at_home_costs_nothing_not_even_latency(topology):
    time = timing.layer_time(np.diag([10] * topology.ep_size), 0, KILOBYTE, topology, TWO_NODES)
    assert (time.dispatch, time.combine) == (0, 0)


@given(TOPOLOGIES, st.integers(0, 9999), st.booleans())
def test_names_of_ranks_inside_a_node_and_of_nodes_do_not_matter(topology, seed, shared):
    rng, rows = np.random.default_rng(seed), draw_rows(topology, seed)
    links = TWO_NODES.model_copy(update={"shared": shared})
    nodes = np.arange(topology.ep_size).reshape(topology.num_nodes, -1)
    order = np.concatenate([rng.permutation(node) for node in rng.permutation(nodes)])
    renamed = timing.layer_time(rows[np.ix_(order, order)], 0, KILOBYTE, topology, links)
    assert renamed.total == pytest.approx(timing.layer_time(rows, 0, KILOBYTE, topology, links).total)


@given(TOPOLOGIES, st.integers(0, 9999), st.integers(2, 9))
def test_without_latency_time_is_proportional_to_rows_and_bandwidth(topology, seed, factor):
    rows = draw_rows(topology, seed)
    free = {"dispatch_latency_us": 0, "combine_latency_us": 0}
    links = links_with(between_nodes=BETWEEN.model_copy(update=free))
    fast = (
        TIER.model_copy(update={"gigabytes_per_second": factor}),
        BETWEEN.model_copy(update={**free, "gigabytes_per_second": 0.5 * factor}),
    )
    once = timing.layer_time(rows, 0, KILOBYTE, topology, links).communication
    assert timing.layer_time(factor * rows, 0, KILOBYTE, topology, links).communication == pytest.approx(factor * once)
    faster = links_with(inside_node=fast[0], between_nodes=fast[1])
    assert timing.layer_time(factor * rows, 0, KILOBYTE, topology, faster).communication == pytest.approx(once)


def test_links_that_know_no_nodes_refuse_several():
    topology = Topology(ep_size=4, num_nodes=2)
    with pytest.raises(ValueError, match="links 'by hand' say nothing of several nodes"):
        timing.layer_time(np.ones((4, 4)), 0, KILOBYTE, topology, LINKS)
    with pytest.raises(ValueError, match="say nothing of several nodes"):
        timing.all_reduce_time(10, 0, KILOBYTE, topology, LINKS)
    with pytest.raises(ValueError, match=r"H200 NVLink, one node.*several nodes"):
        load_links("h200-nvlink", Topology(ep_size=4, num_nodes=2))


# aiconfigurator's published tables of DeepEP in normal mode on one node of 8 H200: tokens a rank, microseconds of
# dispatch and combine. Hidden size and experts of Qwen3-30B-A3B, then of DeepSeek-V3.
QWEN3 = LayerShape(hidden_size=2048, expert_size=768, top_k=8)
DEEPSEEK = LayerShape(hidden_size=7168, expert_size=2048, top_k=8)
PUBLISHED = [
    (QWEN3, 128, [(512, 55, 72), (2048, 126, 180), (8192, 412, 583)]),
    (DEEPSEEK, 256, [(512, 96, 184), (2048, 272, 525), (8192, 974, 1835)]),
]


def test_h200_links_reproduce_the_published_table():
    links, errors = load_links("h200-nvlink"), []
    for shape, experts, points in PUBLISHED:
        remote = uniform_remote_ranks(8, experts, shape.top_k)
        for tokens, dispatch, combine in points:
            rows = np.full((8, 8), tokens * remote / 7)
            time = timing.layer_time(rows, 0, shape, Topology(ep_size=8), links)
            errors += [time.dispatch * 1e6 / dispatch - 1, time.combine * 1e6 / combine - 1]
    assert len(errors) == 12
    assert np.abs(errors).max() < 0.25
    assert np.abs(errors).mean() < 0.12


def test_h200_experts_reproduce_the_published_time():
    """Fused MoE of Qwen3-30B-A3B's shape, EP8, 8,192 tokens a rank, balanced: 0.57 ms."""
    time = timing.layer_time(np.zeros((8, 8)), 8192 * 8, QWEN3, Topology(ep_size=8), load_links("h200-nvlink"))
    assert time.experts == pytest.approx(570e-6, rel=0.01)


def test_every_shipped_calibration_loads_and_says_what_it_is():
    assert len(shipped()) == 20
    for name in shipped():
        links = load_links(name)
        plain = name in ("h200-100g", "pcie5")
        assert links.kind == ("nominal" if plain or "h800" in name else "measured")
        assert links.all_to_all == ("per-rank" if plain else "per-pair" if "-ll" in name else "per-node")
        assert links.source
        assert (links.between_nodes is not None) == name.removesuffix("-ll").endswith("g")


def write(path, **changes):
    path.write_text(json.dumps(json.loads(LINKS.model_dump_json()) | changes))
    return str(path)


def test_a_links_file_survives_a_round_trip(tmp_path):
    assert load_links(write(tmp_path / "links.json")) == LINKS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "red"}, "colour: Extra inputs"),
        ({"inside_node": TIER.model_dump() | {"gigabytes_per_second": -1}}, "inside_node.gigabytes.*: .*than 0"),
        ({"inside_node": TIER.model_dump() | {"combine_latency_us": float("nan")}}, "combine_latency_us: .*finite"),
        ({"inside_node": TIER.model_dump() | {"speed": 1}}, "inside_node.speed: Extra inputs"),
        ({"experts": {"fixed_us": 0, "teraflops": float("inf")}}, "experts.teraflops: .*finite"),
        ({"experts": {"fixed_us": 0}}, "experts.teraflops: Field required"),
        ({"kind": "guessed"}, "kind: "),
        ({"shared": "yes"}, "shared: "),
        ({"dispatch_bytes_per_value": 0}, "dispatch_bytes_per_value: "),
    ],
)  # fmt: skip
def test_a_damaged_links_file_is_refused_by_field(changes, words, tmp_path):
    with pytest.raises(ValueError, match=f"links.json is not valid: .*{words}"):
        load_links(write(tmp_path / "links.json", **changes))


def test_what_is_no_links_file_is_refused(tmp_path):
    (tmp_path / "links.json").write_text("{oops")
    with pytest.raises(ValueError, match=r"links.json is not valid: file: Invalid JSON"):
        load_links(str(tmp_path / "links.json"))
    shipped = r"no links called 'carrier-pigeon': give a file, or one of b200-nvlink, .*, pcie5"
    with pytest.raises(ValueError, match=shipped):
        load_links("carrier-pigeon")
    with pytest.raises(ValueError, match="no links called"):
        load_links(str(tmp_path))


def predicted(method, communication, experts) -> Prediction:
    """Microseconds; as much in dispatch as in combine."""
    time = LayerTime(communication * 0.5e-6, experts * 1e-6, communication * 0.5e-6)
    return Prediction(method=method, rows=np.zeros((2, 2)), busiest_pairs=0, time=time)


LINEAR, EPLB = predicted("linear", 60, 60), predicted("eplb", 60, 40)


@pytest.mark.parametrize(
    ("communication", "experts", "worth", "words"),
    [
        (40, 40, True, "worth it: a MoE layer takes 20.0% less time (communication 20 us less, experts 0 us less"),
        (70, 20, True, "worth it: a MoE layer takes 10.0% less time (communication 10 us more, experts 20 us less"),
        (40, 70, False, "not worth it: what locality saves, its imbalance of expert load costs (communication 20 us"),
        (40, 59, False, "not worth it: what locality saves, its imbalance of expert load costs"),
        (59, 42, False, "not worth it: what locality saves, its imbalance of expert load costs"),
        (60, 40, False, "not worth it: these links carry the plan's traffic no faster (communication 0 us less"),
        (65, 39, False, "not worth it: these links carry the plan's traffic no faster (communication 5 us more"),
        (59, 40, False, "not worth it: it saves 1.0% of a MoE layer's time, less than 2% (communication 1 us less"),
    ],
)  # fmt: skip
def test_the_verdict_names_its_reason(communication, experts, worth, words):
    found = timing.verdict(predicted("ours", communication, experts), [LINEAR, EPLB])
    assert found.worth_it == worth
    assert found.sentence.startswith(words)
    assert found.sentence.endswith("per layer, against eplb)")
    assert found.against == "eplb"
    assert found.gain == pytest.approx(1 - (communication + experts) / 100)


def test_the_gain_of_a_pass_by_hand():
    """A pass of 100 ms, 40 ms in all-to-alls: a saving of 30 % takes 12 ms away and leaves 88."""
    assert timing.end_to_end(0.4, 0.3) == pytest.approx(100 / 88)
    assert timing.end_to_end(0.4, 0.0) == 1
    assert timing.end_to_end(0.4, -0.25) == pytest.approx(100 / 110)


def test_the_verdict_is_against_the_best_alternative():
    ours = predicted("ours", 40, 40)
    without = LayerTime(0, 30e-6, 0, 35e-6)
    found = timing.verdict(ours, [LINEAR, EPLB], without)
    assert (found.worth_it, found.against) == (False, "expert parallelism without all-to-all")
    assert found.gain == pytest.approx(1 - 80 / 65)
    assert "these links" in found.sentence
    slow = timing.verdict(ours, [LINEAR, EPLB], replace(without, all_reduce=1))
    assert (slow.worth_it, slow.against) == (True, "eplb")


def test_nothing_to_gain_where_nothing_takes_time():
    nothing = predicted("linear", 0, 0)
    found = timing.verdict(nothing, [nothing])
    assert (found.worth_it, found.gain) == (False, 0)
    assert found.sentence.startswith("not worth it: nothing travels between ranks (")


def test_times_for_json_are_microseconds_by_part():
    told = {"dispatch_us": 1, "experts_us": 2, "combine_us": 3, "all_reduce_us": 4, "hooks_us": 5}
    found = timing.microseconds(LayerTime(1e-6, 2e-6, 3e-6, 4e-6, 5e-6))
    assert found == pytest.approx({**told, "all_to_all_us": 4, "layer_us": 15})


@pytest.mark.parametrize(
    ("attention", "tokens", "copies", "us"),
    [("dp", 64, False, 5.6), ("dp", 8192, True, 9.2), ("tp", 64, True, 44.6), ("tp", 512, True, 89.4),
     ("tp", 8192, True, 208.44)],
)  # fmt: skip
def test_what_semmoe_s_own_kernels_take(attention, tokens, copies, us):
    """Measured: 3.2 to 9.0, 44.7 and 88.8 us; 208 of 244 in passes over 8,192 rows of prompts."""
    topology = Topology.for_attention(attention, 8)
    gpu, cpu = load_links("h100-nvlink"), LINKS
    assert timing.hooks(tokens, topology, copies, gpu) == pytest.approx(1e-6 * us)
    assert timing.hooks(tokens, topology, copies, cpu) == 0


def test_what_they_take_can_cost_what_locality_saves():
    ours = predicted("ours", 55, 40)
    assert timing.verdict(ours, [EPLB]).worth_it
    charged = timing.verdict(replace(ours, time=replace(ours.time, hooks=9.2e-6)), [EPLB])
    assert (charged.worth_it, charged.gain) == (False, pytest.approx(-0.042))
    assert charged.sentence == (
        "not worth it: what locality saves, semmoe's own kernels cost (communication 5 us less, experts 0 us less, "
        "semmoe's own kernels 9 us more per layer, against eplb)"
    )
