"""Estimates of whole models: configurations, one case by hand, directions, break-even, and figures of others.

tests/estimate.json holds configurations (the fields that are read) and points, with their sources.
"""

import json
import re
from dataclasses import replace
from math import hypot
from pathlib import Path

import pytest

from benchmarks.bench_estimate import KNOWN, beside_aiconfigurator, beside_deepep, beside_grouped, beside_real
from semmoe import cost
from semmoe.calibration import load_links
from semmoe.cost import WORTH
from semmoe.estimate import breakeven, roofline
from semmoe.estimate.answer import estimate
from semmoe.estimate.forecast import HOOKS, Case, label, run, with_bandwidth, with_batch
from semmoe.estimate.hardware import GPUS, gpu_of
from semmoe.estimate.model import Grouped, Latent, read_model
from semmoe.estimate.routing import EPLB, PLAN, VANILLA, assumed, with_all_reduce
from semmoe.estimate.settings import EstimateSettings
from semmoe.topology import Topology

KINDS = {"per-node", "per-pair"}


def config(folder, name="DeepSeek-V3", **changes):
    """A configuration file; a change to None leaves the field out."""
    fields = {k: v for k, v in (KNOWN["configs"][name] | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def deepseek(tmp_path):
    return read_model(config(tmp_path))


def case(model, ep_size=64, num_nodes=8, attention="dp", links="h200-400g", **settings):
    topology = Topology.for_attention(attention, ep_size, num_nodes=num_nodes)
    both = load_links(links, topology), load_links(f"{links}-ll", topology)
    gpu = gpu_of(None, links, both[0])
    asked = EstimateSettings(**settings)
    return Case(model=model, gpu=gpu, topology=topology, links=both[0], decode_links=both[1], settings=asked)


def routings(one):
    return assumed(one.model, one.topology, KINDS, one.settings)


# Configurations.


@pytest.mark.parametrize(
    ("name", "billions", "attention", "layers"),
    [
        ("DeepSeek-V3", 671, Latent, (61, 3)),
        ("DeepSeek-V2-Lite", 15.7, Latent, (27, 1)),
        ("Qwen3-30B-A3B", 30.5, Grouped, (48, 0)),
        ("Mixtral-8x7B-v0.1", 46.7, Grouped, (32, 0)),
        ("gpt-oss-20b", 20.9, Grouped, (24, 0)),
        ("OLMoE-1B-7B", 6.9, Grouped, (16, 0)),
    ],
)
def test_sizes_of_a_configuration_give_the_known_number_of_weights(tmp_path, name, billions, attention, layers):
    """All weights on one GPU, counted as if each took one byte; norms and biases are not counted."""
    model = read_model(config(tmp_path, name), weights="bf16")
    assert model.bytes_per_gpu(1, model.num_experts) / 2e9 == pytest.approx(billions, rel=0.01)
    assert isinstance(model.attention, attention)
    assert (model.num_layers, model.dense_layers) == layers


@pytest.mark.parametrize(
    ("name", "stored"),
    [("DeepSeek-V3", (1, 1)), ("gpt-oss-20b", (2, 0.53125)), ("OLMoE-1B-7B", (2, 2))],
)
def test_how_weights_are_stored_is_read_or_given(tmp_path, name, stored):
    model = read_model(config(tmp_path, name))
    assert (model.dense_bytes, model.expert_bytes) == stored
    assert read_model(tmp_path, "fp8").expert_bytes == 1


def test_a_window_is_seen_by_its_share_of_layers(tmp_path):
    attention = read_model(config(tmp_path, "gpt-oss-20b")).attention
    assert attention.keys_seen(1128) == (1128 + 128) / 2
    assert attention.keys_seen(100) == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "has no hidden_size, which an estimate needs"),
        ({"n_routed_experts": None}, "has no n_routed_experts"),
        ({"v_head_dim": None}, "has no v_head_dim"),
        ({"intermediate_size": None}, "has no intermediate_size"),
        ({"hidden_size": 1.5}, "hidden_size must be a whole number"),
        ({"vocab_size": 0}, "vocab_size must be a whole number"),
        ({"model_type": "gpt2"}, "nothing is known of model_type 'gpt2'"),
        ({"model_type": ["mixtral"]}, "nothing is known of model_type"),
        ({"quantization_config": {"quant_method": []}}, "nothing is known of quantization"),
        ({"model_type": None}, "nothing is known of model_type None"),
        ({"num_experts_per_tok": 300}, "300 experts per token exceed 256"),
        ({"first_k_dense_replace": 61}, "no layer has experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"quantization_config": {"quant_method": "awq"}}, "nothing is known of quantization by 'awq'"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("content", "words"), [("{", "is not JSON"), ("[]", "is not a JSON object"), (None, "missing")]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_model(tmp_path)


# By hand.


def test_a_decoding_step_by_hand(deepseek):
    """DeepSeek-V3 on 64 H200: the terms of docs/estimate.md, in microseconds."""
    rate, sent = 0.79 * 4.8e6, {"dispatch": 7168 + 64, "combine": 2 * 7168}  # bytes per microsecond; bytes of a row
    matrices = [(7168, 2112, 1), (1536, 24576, 1), (512, 16384, 2), (512, 16384, 2), (16384, 7168, 1)]
    projections = sum((i * o * w + 128 * (i * w + 2 * o)) / rate + (8 if w == 1 else 4) for i, o, w in matrices)
    core = 128 * 2250 * 128 * 2 * (576 + 512) / (0.6 * 989e6) + 4
    norms = 2 * (4 + 4 * 128 * 7168 / rate)
    router = (7168 * 256 * 2 + 128 * (2 * 7168 + 2 * 256)) / rate + 4
    up, down = (7168 * 4096 + 128 * (7168 + 2 * 4096)) / rate + 8, (2048 * 7168 + 128 * (2048 + 2 * 7168)) / rate + 8
    experts = 128 * 8 * 6 * 7168 * 2048 / (0.55 * 1979e6) + 19
    travel = {
        name: hypot(128 * 7 * size / 47.2e3, 128 * 7 / 8 * size / 221e3) + fixed
        for (name, size), fixed in zip(sent.items(), (13.2 + 3 * 6.83, 11.1 + 3 * 13.4), strict=True)
    }
    found = run(one := case(deepseek), routings(one)[VANILLA], decode=True)
    layers = {name: seconds * 1e6 for name, seconds in found.parts.items()}
    assert layers["attention projections"] / 61 == pytest.approx(projections)
    assert layers["attention core"] / 61 == pytest.approx(core)
    assert layers["router and norms"] == pytest.approx(61 * norms + 58 * router)
    assert layers["shared experts"] / 58 == pytest.approx(up + 4 + down)
    assert layers["routed experts"] / 58 == pytest.approx(experts)
    assert [layers[name] / 58 for name in sent] == pytest.approx(list(travel.values()))
    assert found.total == pytest.approx(sum(found.parts.values()))


def test_the_example_of_the_page_adds_up(deepseek):
    """Every row of its table, and the sum; norms and router are one part of a step."""
    page = (Path(__file__).parents[1] / "docs" / "estimate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|$", page, re.M)
    said = {name: float(ms) for name, _, _, ms in rows}
    assert len(said) == 10
    for name, microseconds, layers, _ in rows:
        assert float(microseconds) * int(layers) / 1e3 == pytest.approx(said[name], abs=0.006), name
    whole = float(re.search(r"\*\*all\*\* .*\*\*([\d.]+)\*\*", page)[1])
    assert sum(said.values()) == pytest.approx(whole, abs=0.03)
    said["router and norms"] = said.pop("norms") + said.pop("router")
    one = case(deepseek, saving=0.3)
    found = run(one, routings(one)[VANILLA], decode=True)
    assert {name: seconds * 1e3 for name, seconds in found.parts.items()} == pytest.approx(said, abs=0.011)
    plan = run(one, routings(one)[PLAN], decode=True)
    assert f"so {plan.total * 1e3:.2f} ms: {1 - plan.total / found.total:.1%}".replace("%", " %") in " ".join(
        page.split()
    )
    assert f"below {breakeven.bandwidth(one, routings(one)).value:.0f} GB/s between nodes" in " ".join(page.split())


def test_the_page_says_what_the_benchmark_finds():
    page = (Path(__file__).parents[1] / "docs" / "estimate.md").read_text(encoding="utf-8")
    for point in KNOWN["real"]["points"]:
        assert (
            f"| {beside_real(point)['ours']:,.0f} tokens/s | {point['tokens_per_second_per_gpu']:,} tokens/s |" in page
        )
    for point in POINTS:
        if point["requests"] == (128 if point["decode"] else 4) and point["input_length"] == (
            2000 if point["decode"] else 4000
        ):
            found, digits = beside_aiconfigurator(point), 1 if point["decode"] else 0
            assert f"| {found['ours']['ms']:,.{digits}f} ms | {point['ms']:,.{digits}f} ms |" in page


def test_experts_of_a_small_batch_cost_the_weights_that_are_hit(deepseek):
    """One token of one rank: 8 of 256 experts, on a rank that holds all of them."""
    work = replace(
        WORK, rows=1, requests=1, ep_size=1, local_experts=256,
    )  # fmt: skip
    seconds = roofline.routed(deepseek, work, 1.0, GPUS["h200"])
    assert seconds == pytest.approx(8 * 3 * 7168 * 2048 / (0.79 * 4.8e12) + 19e-6)


WORK = roofline.Work(
    decode=True, rows=128, requests=128, context=2250, attn_ranks=1, ep_size=64, local_experts=4, kept_bytes=2
)


def test_two_halves_that_take_turns_hide_the_shorter(deepseek):
    model = replace(deepseek, dense_layers=0)
    plain, turns = case(model), case(model, overlap=True)
    half = run(with_batch(plain, 64), routings(plain)[VANILLA], decode=True)
    found = run(turns, routings(turns)[VANILLA], decode=True)
    travel = half.parts["dispatch"] + half.parts["combine"]
    compute = half.total - travel - half.parts["output head"]
    assert found.hidden == pytest.approx(2 * min(travel, compute))
    assert found.total == pytest.approx(2 * max(travel, compute) + found.parts["output head"])
    prefill = run(turns, routings(turns)[VANILLA], decode=False)
    assert prefill.parts["SMs of communication"] > 0
    assert "SMs of communication" not in found.parts


def test_copies_take_their_share_of_the_cache(deepseek):
    """64 copies over 64 ranks: one expert of 44 MB in each of 58 layers on every GPU."""
    found = breakeven.memory(case(deepseek), 64)
    assert found["copies_gb"] == pytest.approx(58 * 3 * 7168 * 2048 / 1e9)
    left = 0.9 * 141 - found["weights_gb"]
    assert found["kv_lost"] == pytest.approx(found["copies_gb"] / left)
    assert found["kv_tokens_without_copies"] == pytest.approx(left * 1e9 / (576 * 2 * 61))
    assert found["kv_tokens"] == pytest.approx((left - found["copies_gb"]) * 1e9 / (576 * 2 * 61))


def test_a_model_that_does_not_fit_is_refused(deepseek):
    with pytest.raises(ValueError, match="does not fit: its weights take"):
        breakeven.memory(case(deepseek, ep_size=2, num_nodes=1, links="h100-nvlink"), 0)


# Directions.


def total(one, method=VANILLA, decode=True):
    return run(one, routings(one)[method], decode).total


@pytest.mark.parametrize("overlap", [False, True])
def test_faster_links_are_never_slower_and_more_work_is_never_faster(deepseek, overlap):
    one = case(deepseek, overlap=overlap, saving=0.3)
    for method in (VANILLA, EPLB, PLAN):
        by_speed = [total(with_bandwidth(one, speed), method) for speed in (5, 20, 50, 400)]
        by_batch = [total(with_batch(one, batch), method) for batch in (1, 16, 128, 512)]
        assert by_speed == sorted(by_speed, reverse=True)
        assert by_batch == sorted(by_batch)
    for name, values in {"input_length": (1, 500, 8000), "load": (1.0, 2.0, 4.0)}.items():
        for decode in (True, False):
            found = [total(replace(one, settings=replace(one.settings, **{name: v})), decode=decode) for v in values]
            assert found == sorted(found)


@pytest.mark.parametrize("attention", ["dp", "tp"])
def test_a_faster_gpu_is_never_slower(deepseek, attention):
    one = case(deepseek, ep_size=8, num_nodes=1, links="h200-nvlink", attention=attention)
    by_gpu = [total(replace(one, gpu=GPUS[name])) for name in ("h100", "h200", "b200", "gb200")]
    assert by_gpu == sorted(by_gpu, reverse=True)


def test_what_a_plan_saves_is_what_its_rows_and_load_say(deepseek):
    one = case(deepseek, saving=0.25, load=1.5, plan_load=1.2, redundant_experts=64)
    found = routings(one)
    assert found[PLAN].rows["per-pair"] == tuple(0.75 * tier for tier in found[VANILLA].rows["per-pair"])
    assert found[EPLB].rows == found[VANILLA].rows
    assert [found[name].load for name in (VANILLA, EPLB, PLAN)] == [1.5, 1.0, 1.2]
    assert [found[name].redundant_experts for name in (VANILLA, EPLB, PLAN)] == [0, 64, 64]
    assert found[VANILLA].rows["per-pair"] == pytest.approx((8 * 7 / 64, 8 * 56 / 64))


def test_attention_groups_share_heads_and_pay_an_all_reduce(deepseek):
    apart, together = (case(deepseek, 8, 1, attention, "h200-nvlink", batch=16) for attention in ("dp", "tp"))
    alone, shared = (run(one, routings(one)[VANILLA], decode=True).parts for one in (apart, together))
    assert shared["all-reduces"] > 0
    assert "all-reduces" not in alone
    assert shared["routed experts"] == alone["routed experts"]


def test_without_all_to_all_rows_are_summed_once_more(deepseek):
    one = case(deepseek, 8, 1, "tp", "h200-nvlink", batch=16, saving=0.5, load=1.5)
    found = with_all_reduce(routings(one), one.topology)
    passes = {name: run(one, routing, decode=True) for name, routing in found.items()}
    reduced, vanilla = passes["all-reduce"].parts, passes[VANILLA].parts
    assert not {"dispatch", "combine"} & reduced.keys()
    assert reduced["all-reduces"] / vanilla["all-reduces"] == pytest.approx((2 * 58 + 2 * 3) / (58 + 2 * 3))
    assert reduced["routed experts"] == passes[EPLB].parts["routed experts"]
    assert with_all_reduce(found_of_dp := routings(case(deepseek)), case(deepseek).topology) == found_of_dp


# Break-even.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("saving", [0.2, 0.5])
def test_the_verdict_flips_at_the_break_even(deepseek, overlap, saving):
    one = case(deepseek, saving=saving, plan_load=1.1, overlap=overlap)
    speed = breakeven.bandwidth(one, routings(one))
    assert speed.when == "below"
    gains = [
        breakeven.decode_gain(with_bandwidth(one, speed.value * factor), routings(one)) for factor in (0.999, 1.001)
    ]
    assert gains[0] >= WORTH > gains[1]
    slow = with_bandwidth(one, speed.value * 0.5)
    size = breakeven.batch(slow, routings(slow), 1024)
    if size.when == "from":
        gains = [breakeven.decode_gain(with_batch(slow, size.value - less), routings(slow)) for less in (0, 1)]
        assert gains[0] >= WORTH > gains[1]


def test_never_and_always_are_said(deepseek):
    none, better = case(deepseek, saving=0.0), case(deepseek, saving=0.3, redundant_experts=0)
    assert breakeven.bandwidth(none, routings(none)).when == "never"
    assert breakeven.batch(none, routings(none), 512).when == "never"
    uneven = {name: replace(one, load=1.0 if name == PLAN else 8.0) for name, one in routings(better).items()}
    assert breakeven.bandwidth(better, uneven).when == "always"
    alone = case(deepseek, ep_size=1, num_nodes=1, links="h200-nvlink", saving=0.3)
    assert breakeven.bandwidth(alone, routings(alone)).when == "never"


# Labels.


def test_figures_say_how_they_were_found(deepseek):
    near, far = case(deepseek, 32, 4), case(deepseek, 128, 16)
    assert label(near, "attention core", decode=True) == label(near, "dispatch", decode=True) == "fitted"
    assert label(far, "attention core", decode=True) == label(far, "dispatch", decode=True) == "extrapolated"
    assert label(case(deepseek, links="h800-400g"), "combine", decode=True) == "nominal"
    assert label(replace(near, gpu=GPUS["b200"]), "attention core", decode=True) == "extrapolated"


# Beside the figures of others.

POINTS = KNOWN["aiconfigurator"]["points"]
SLOWER = [p for p in POINTS if p["ep_size"] == 64 and not p["decode"]]  # eight nodes in normal mode


@pytest.mark.parametrize("point", [p for p in POINTS if p not in SLOWER], ids=str)
def test_passes_are_within_twenty_percent_of_aiconfigurator(point):
    assert abs(beside_aiconfigurator(point)["ratio"] - 1) <= 0.20


def test_a_prefill_on_eight_nodes_is_optimistic_by_the_links():
    """Their table of DeepEP's normal mode on eight nodes has half the speed of four: docs/estimate.md says so."""
    (point,) = SLOWER
    found = beside_aiconfigurator(point)
    assert 0.70 <= found["ratio"] <= 0.80
    rest = [ours["ms"] - ours["links_ms"] for ours in (found["ours"], point)]
    assert rest[0] / rest[1] == pytest.approx(1, abs=0.20)


@pytest.mark.parametrize("point", KNOWN["grouped"]["points"], ids=str)
def test_other_attention_on_other_gpus_is_within_ten_percent(point):
    """Nothing of these was fitted: grouped-query attention, BF16, two models, one of the GPUs a B200."""
    assert beside_grouped(point) == pytest.approx(1, abs=0.10)


@pytest.mark.parametrize("point", KNOWN["real"]["points"], ids=str)
def test_real_deployments_are_within_a_quarter(point):
    assert abs(beside_real(point)["ratio"] - 1) <= 0.25


@pytest.mark.parametrize("point", KNOWN["deepep_h800"]["points"], ids=str)
def test_low_latency_links_hold_up_to_32_nodes(point):
    assert beside_deepep(*point) == pytest.approx((1, 1), abs=0.15)


def test_links_of_an_h800_are_an_h100s_with_its_nvlink():
    for suffix in ("", "-ll"):
        slow, fast = load_links(f"h800-400g{suffix}"), load_links(f"h100-400g{suffix}")
        ratio = slow.inside_node.gigabytes_per_second / fast.inside_node.gigabytes_per_second
        assert ratio == pytest.approx(4 / 9, rel=0.01)
        assert slow.between_nodes == fast.between_nodes


def test_own_kernels_can_cost_more_than_locality_saves(deepseek):
    """They are the plan's alone, and fall under the same verdict."""
    one = case(deepseek, ep_size=16, num_nodes=2, links="h100-400g", saving=0.02, batch=1)
    found = routings(one)
    parts = {
        (name, decode): run(one, found[name], decode).parts for name in (VANILLA, PLAN) for decode in (True, False)
    }
    assert [key for key, has in parts.items() if HOOKS in has] == [(PLAN, True), (PLAN, False)]
    assert parts[PLAN, True][HOOKS] == parts[PLAN, False][HOOKS] == pytest.approx(58 * 5.6e-6)
    assert estimate(one, found)["verdict"]["sentence"].startswith(f"not worth it: what locality saves, {HOOKS} cost")
    shared = case(deepseek, ep_size=8, num_nodes=1, attention="tp", links="h100-nvlink", saving=0.5, batch=16)
    copied = run(shared, replace(routings(shared)[PLAN], redundant_experts=8), decode=True).parts[HOOKS]
    assert copied == pytest.approx(58 * (5.6e-6 + 3.6e-6 + 29e-6 + 128 * 0.1e-6))
    prompts = run(shared, routings(shared)[PLAN], decode=False).parts[HOOKS]
    rows = 8 * shared.settings.prompts * shared.settings.input_length
    assert prompts == pytest.approx(58 * cost.hooks(rows, shared.topology, copies=False))
    assert prompts > 58 * (5.6e-6 + 29e-6 + 512 * 0.1e-6)
