"""The parts of the vLLM plug-in that need no vLLM: placement, routing, steps, hooks, arguments."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_boundary import begins

from semmoe.core import Placement, Plan
from semmoe.engines.hooks import Hook, check
from semmoe.engines.launch import Asked, join
from semmoe.engines.settings import from_environment
from semmoe.engines.step import Pass, SlotWatch
from semmoe.engines.vllm import launch
from semmoe.engines.vllm.placement import PlacedExperts, layer_index, refuse_reload, unpacked
from semmoe.engines.vllm.registry import around
from semmoe.engines.vllm.routing import RealRows, RoutedLayer
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.step import Slots, accepted, fed_tokens, read_step
from semmoe.live.recorder.passes import PassRecorder
from semmoe.requests.policy import RoundRobin
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.traffic import TrafficCounter
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

COPIES = np.array([[0, 1, 1, 2], [2, 0, 1, 0]], np.int32)  # three experts on two ranks, one of them twice


def plan():
    identity = Fingerprint(
        model="m", architecture_hash="", tokenizer_hash="", vocab_size=8, num_layers=2, num_experts=3, top_k=2
    )
    placement = Placement(physical_to_logical_map=COPIES, num_experts=3, ep_size=2)
    return Plan(
        topology=Topology(ep_size=2),
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=identity,
        method="test",
    )


class Experts:
    """What the hook sees of a layer of vLLM's: rank 0 of two holds physical experts 0 and 1."""

    def __init__(self, name):
        self.layer_name, self.loaded = name, {}

    def weight_loader(self, param, weight, name, shard, expert, return_success=False):
        if expert < 2:
            self.loaded[expert, shard] = float(weight)
        return expert < 2 if return_success else None


def load(placed, layer, expert, value=None):
    value = torch.tensor(float(expert) if value is None else value)
    return placed.load(Experts.weight_loader, layer, None, value, "w", "w1", expert, True)


def placed_layers():
    placed, layers = PlacedExperts(plan()), [Experts(f"model.layers.{i}.mlp.experts") for i in (1, 4)]
    for layer in layers:
        placed.made(layer.layer_name)
    return placed, layers


def test_experts_are_loaded_to_every_slot_of_the_plan():
    placed, layers = placed_layers()
    assert placed.counts(lambda experts, redundant: (experts, experts, 0), 3, 0) == (4, 3, 0)
    for layer, here in zip(layers, ([True, True, False], [True, False, True]), strict=True):
        assert [load(placed, layer, e) for e in (0, 1, 2)] == here
        assert load(placed, layer, 3) is False  # vLLM's own copy of the first expert
    assert layers[0].loaded == {(0, "w1"): 0, (1, "w1"): 1}
    assert layers[1].loaded == {(0, "w1"): 2, (1, "w1"): 0}
    placed.check()


def test_a_loader_that_goes_another_way_is_refused():
    placed, layers = placed_layers()
    with pytest.raises(ValueError, match="placed 0 of 4 experts of layer 1"):
        placed.check()
    load(placed, layers[0], 0)
    with pytest.raises(ValueError, match="placed 1 of 4"):
        placed.check()
    with pytest.raises(ValueError, match="all experts of a layer at once"):
        load(placed, layers[0], 0, [[[1.0]]])


def test_a_draft_model_is_left_alone():
    placed, layers = placed_layers()
    load(placed, layers[0], 0)
    draft = Experts("model.layers.9.mlp.experts")
    placed.made(draft.layer_name)
    assert placed.counts(lambda experts, redundant: (experts, experts, 0), 3, 0) == (3, 3, 0)
    load(placed, draft, 1)
    assert draft.loaded == {(1, "w1"): 1}


def test_weights_are_not_loaded_again():
    with pytest.raises(ValueError, match="cannot be loaded again into an engine on a plan"):
        refuse_reload(lambda *given: None, None, weights_path="other")


def test_models_with_other_layers_are_refused():
    placed = PlacedExperts(plan())
    placed.made("model.layers.0.mlp.experts")
    with pytest.raises(ValueError, match="has 1 MoE layers, the plan was made for 2"):
        load(placed, Experts("model.layers.0.mlp.experts"), 0)
    with pytest.raises(ValueError, match="names no decoder layer"):
        layer_index("model.experts")


@pytest.mark.parametrize("drop", [False, True])
def test_routing_is_looked_up_counted_and_seen(drop):
    seen, counter, real = [], TrafficCounter(2, 0), RealRows(torch.tensor(2))
    table = torch.tensor([0, 3, 2])
    copies = RankCopies((table // 2)[:, None], table[:, None], table // 2, 0, 2)
    layer = RoutedLayer(5, copies, 2, real, counter, drop, lambda *call: seen.append(call))
    ids = torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int32)
    layer.routed(torch.ones(3, 2), ids)
    out = layer.to_physical(ids)
    assert seen[0][0] == 5
    assert seen[0][1] is ids
    assert out.dtype == torch.int32
    assert out.tolist() == [[0, 3], [3, 2], [-1, -1] if drop else [0, 2]]
    assert counter.totals() == (2, [1, 3], [0, 2], [0])


def runner(ids, positions, lengths, prompts, requests):
    ends = np.concatenate([[0], np.cumsum(lengths), [0] * 3]).astype(np.int32)
    batch = SimpleNamespace(num_reqs=len(requests), req_ids=requests, num_prompt_tokens=np.array(prompts, np.int32))
    buffer = SimpleNamespace(gpu=torch.tensor([*ids, 0, 0], dtype=torch.int32))
    return SimpleNamespace(
        input_ids=buffer, positions=torch.tensor([*positions, 0, 0]), input_batch=batch,
        query_start_loc=SimpleNamespace(np=ends),
    )  # fmt: skip


def test_a_pass_is_read_without_padding():
    slots = Slots()
    step = read_step(runner([7, 8, 9, 5], [0, 1, 2, 6], [3, 1], [5, 6], ["a", "b"]), slots, 4)
    assert step.token_ids.tolist() == [7, 8, 9, 5]
    assert step.rows.tolist() == [0, 0, 0, 1]
    assert step.decoding.tolist() == [False, False, False, True]
    assert step.slots.tolist() == [0, 1]
    slots.release("a")
    again = read_step(runner([5, 1], [7, 0], [1, 1], [6, 1], ["b", "c"]), slots, 2)
    assert again.slots.tolist() == [1, 0]


def test_rejected_drafts_do_not_stand():
    """Request a runs a token and three drafts, of which one is right; b a chunk of its prompt; c one token."""
    given = runner([5, 6, 7, 8, 1, 2, 9], [4, 5, 6, 7, 0, 1, 3], [4, 2, 1], [4, 3, 2], ["a", "b", "c"])
    step = read_step(given, Slots(), 7)
    sampled = np.array([[6, 3, -1, -1], [-1, -1, -1, -1], [9, -1, -1, -1]])
    assert accepted(step, [3, 0, 0], sampled).tolist() == [True, True, False, False, True, True, True]
    seen, passes = [], PassRecorder(SimpleNamespace(recording=True, observe=lambda *call: seen.append(call)), 1)
    passes.begin(Pass(lambda: step, decodes=False))
    passes.put(0, torch.arange(14).reshape(7, 2))
    passes.end()
    assert not passes.recording
    passes.tell(accepted(step, [3, 0, 0], sampled))
    passes.tell(slice(None))  # a pass is told once
    ((_, rows),) = seen
    assert (rows.slots.tolist(), rows.positions.tolist(), rows.token_ids.tolist()) == (
        [0, 0, 1, 1, 2],
        [4, 5, 0, 1, 3],
        [5, 6, 1, 2, 9],
    )
    assert rows.expert_ids[:, 0, 0].tolist() == [0, 2, 8, 10, 12]


def test_a_replayed_graph_tells_the_routing_of_its_own_pass():
    """Hooks run once, while the pass is captured; what they captured writes to the same buffer in every replay."""
    seen, told = [], torch.zeros((4, 1, 2), dtype=torch.int32)
    passes = PassRecorder(
        SimpleNamespace(recording=True, observe=lambda _, rows: seen.append(rows.expert_ids)), 1, told
    )
    assert passes.hooked
    given = torch.arange(6).reshape(3, 2)
    passes.put(0, given)
    both = runner([5, 1], [7, 0], [1, 1], [6, 1], ["b", "c"])
    for start in (10, 20):
        passes.begin(Pass(lambda: read_step(both, Slots(), 2), decodes=True))
        told[:3, 0] = given + start  # a replay
        passes.end()
        passes.tell(slice(None))
    assert [routed[:, 0].tolist() for routed in seen] == [[[10, 11], [12, 13]], [[20, 21], [22, 23]]]
    prompt = runner(range(5), range(5), [5], [9], ["d"])
    passes.begin(Pass(lambda: read_step(prompt, Slots(), 5), decodes=False))
    passes.end()
    passes.tell(slice(None))
    assert len(seen) == 2  # five tokens do not fit in the buffer


@pytest.mark.parametrize(("limit", "stops", "fed"), [(9, [], 6), (2, [], 4), (9, [8], 5), (9, [3, 4], 6)])
def test_what_is_sampled_behind_the_end_was_not_fed(limit, stops, fed):
    sampling = SimpleNamespace(max_tokens=limit, stop_token_ids=stops, eos_token_id=None)
    state = SimpleNamespace(prompt_token_ids=[1, 2, 3], output_token_ids=[7, 9, 8, 5], sampling_params=sampling)
    assert fed_tokens(state) == fed


def test_a_request_goes_on_behind_rejected_drafts():
    def step(first, count):
        return read_step(runner(range(count), range(first, first + count), [count], [2], ["a"]), Slots(), count)

    def in_slot_1(step):  # vLLM's slots count from 1 in the shuffle
        return begins(watch, replace(step, slots=step.slots + 1))

    watch = SlotWatch(2, torch.device("cpu"), drafts=3)
    begun = [len(in_slot_1(step(*rows))) for rows in ((0, 4), (4, 4), (5, 4), (7, 1), (20, 1), (2, 3), (0, 1))]
    assert begun == [1, 0, 0, 0, 1, 1, 1]
    assert [len(in_slot_1(step(*rows))) for rows in ((0, 2), (0, 2), (1, 3))] == [1, 1, 0]  # a short request before


class Engine:
    """To be hooked."""

    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x

    @property
    def value(self):
        return 1


def test_hooks_wrap_methods_static_methods_and_properties(monkeypatch):
    for name in ("method", "static", "value"):
        monkeypatch.setattr(Engine, name, Engine.__dict__[name])  # restored afterwards
        around(Hook(f"{__name__}.Engine.{name}", "test"), lambda original, *call: original(*call) + 1)
    engine = Engine()
    assert (engine.method(1), engine.static(1), Engine.static(2), engine.value) == (2, 2, 3, 2)


def test_what_moved_is_named():
    with pytest.raises(RuntimeError, match=r"gone.*; .*has no parameter y"):
        check([Hook(f"{__name__}.Engine.gone", "a"), Hook(f"{__name__}.Engine.method", "b", ("y",))])


def test_arguments_say_the_topology():
    hybrid = launch.arguments(Topology(ep_size=4, dp_size=2), eager=True)
    words = join(hybrid, ["--dtype", "float32"], launch.DECIDED, "vllm serve")
    assert words == ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel",
                     "--enforce-eager", "--dtype", "float32"]  # fmt: skip
    assert launch.arguments(Topology(ep_size=1), eager=False) == {}
    for word in ("-tp", "--enable-eplb", "--data-parallel-size=4"):
        with pytest.raises(ValueError, match="comes from the plan"):
            join(hybrid, [word], launch.DECIDED, "vllm serve")


def test_rows_that_go_everywhere_are_counted_everywhere():
    for gathers, rows in ((False, [2, 0, 1]), (True, [3, 0, 3])):
        counter = TrafficCounter(3, 1, gathers=gathers, num_nodes=3)
        counter.count(torch.tensor([[0, 1], [0, 2], [1, 1], [-1, -1]]))
        assert counter.totals() == (3, [2, 3, 1], rows, rows)


@pytest.mark.parametrize("deep_ep", [False, True])
def test_a_backend_that_sends_rows_where_they_go_is_chosen(deep_ep, monkeypatch, capsys):
    monkeypatch.setattr(launch, "find_spec", lambda name: object() if deep_ep else None)
    chosen = launch.all_to_all([])
    assert chosen == ({"all2all_backend": "deepep_high_throughput"} if deep_ep else {})
    assert ("saves no dispatch byte" in capsys.readouterr().err) != deep_ep
    for words in (["--all2all-backend=naive"], ["--seed", "1", "--all2all-backend", "allgather_reducescatter"]):
        assert launch.all_to_all(words) == {}
        assert "saves no dispatch byte" in capsys.readouterr().err
    assert launch.all_to_all(["--all2all-backend", "nixl_ep"]) == {}
    assert capsys.readouterr().err == ""


def test_gpt_oss_is_loaded_expert_by_expert():
    given = [("layers.0.mlp.experts.w13_weight_scale", torch.arange(6).reshape(3, 2)), ("norm.weight", torch.ones(1))]
    seen = unpacked(lambda model, weights: dict(weights), None, given)
    assert list(seen) == [*(f"layers.0.mlp.experts.{e}.w13_weight_scale" for e in range(3)), "norm.weight"]
    assert seen["layers.0.mlp.experts.2.w13_weight_scale"].tolist() == [4, 5]
    with pytest.raises(ValueError, match="w13_input_scale cannot be placed"):
        unpacked(lambda model, weights: dict(weights), None, [("layers.0.mlp.experts.w13_input_scale", torch.ones(3))])


def test_settings_of_vllm():
    settings = from_environment(VllmSettings, {"SEMMOE_PLAN": "p", "SEMMOE_SEQUENCE_PARALLEL": "1"})
    assert (settings.plan, settings.sequence_parallel) == ("p", "1")
    with pytest.raises(ValueError, match="SEMMOE_SEQUENCE_PARALLEL must be"):
        from_environment(VllmSettings, {"SEMMOE_SEQUENCE_PARALLEL": "yes"})
    with pytest.raises(ValueError, match="SEMMOE_RECORD must be"):
        from_environment(VllmSettings, {"SEMMOE_RECORD": "yes"})
    with pytest.raises(ValueError, match="SEMMOE_FUSED is not a setting"):
        from_environment(VllmSettings, {"SEMMOE_FUSED": "1"})


def asked(folder, options, **settings):
    given = VllmSettings(control=str(folder), **settings)
    return Asked(model="m", topology=Topology(ep_size=2), settings=given, host="127.0.0.1", port=8000, options=options)


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        (["--all2all-backend", "deepep_low_latency"], {}, "--compilation-config"),
        (["--all2all-backend=nixl_ep"], {}, "--compilation-config"),
        ([], {}, "--enforce-eager"),
        (["--all2all-backend", "deepep_high_throughput"], {}, "--enforce-eager"),
        (["--all2all-backend", "deepep_low_latency", "--speculative-config", "{}"], {}, "--enforce-eager"),
        (["--all2all-backend", "deepep_low_latency"], {"shuffle": "off"}, ""),
    ],
)
def test_shuffled_passes_are_captured_where_the_all_to_all_allows_it(options, given, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    shuffles = SimpleNamespace(tokens=SimpleNamespace(by_tables=True), requests=SimpleNamespace(by_tables=False))
    words = launch.planned(asked(tmp_path, options, **given), shuffles)[1]
    assert {"--compilation-config", "--enforce-eager"} & set(words) == ({expected} if expected else set())


def test_what_the_user_says_of_graphs_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    shuffles = SimpleNamespace(tokens=SimpleNamespace(by_tables=True), requests=SimpleNamespace(by_tables=False))
    given = ["--all2all-backend", "nixl_ep", "--enforce-eager"]
    words = launch.planned(asked(tmp_path, given), shuffles)[1]
    assert words[-3:] == given
    assert "--compilation-config" not in words


def test_a_node_without_a_front_end_is_not_told_how_many_it_has(tmp_path):
    assert "--api-server-count" in launch.vanilla(asked(tmp_path, []))[1]
    assert "--api-server-count" not in launch.vanilla(asked(tmp_path, ["--headless"]))[1]


def test_routed_experts_are_not_returned_where_tokens_are_split(tmp_path):
    """vLLM takes a rank's rows for those of all its tokens, in their order."""
    tables = SimpleNamespace(by_tables=True)
    shuffles = SimpleNamespace(tokens=tables, requests=tables)
    with pytest.raises(ValueError, match="omit --enable-return-routed-experts, or use attention dp"):
        launch.planned(asked(tmp_path, ["--enable-return-routed-experts"]), shuffles)
