"""The SGLang adaptor's parts that need no SGLang: arguments, settings, copies, requests' slots."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_boundary import begins

from semmoe.cli.demo import MODEL
from semmoe.core import Placement, Plan
from semmoe.engines.launch import Asked, command_line, join
from semmoe.engines.settings import PluginSettings, from_environment
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.location import ChosenCopies, check_dispatch, check_location
from semmoe.engines.sglang.step import read_step
from semmoe.engines.step import SlotWatch
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.placement.linear import vanilla_plan
from semmoe.requests.policy import RoundRobin
from semmoe.runtime.copies import rank_copies
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

IDENTITY = Fingerprint(
    model="m", architecture_hash="", tokenizer_hash="", vocab_size=8, num_layers=1, num_experts=3, top_k=2
)


def copies_plan():
    """Experts 0 1 | 1 2 on two ranks."""
    placement = Placement(physical_to_logical_map=np.array([[0, 1, 1, 2]], np.int32), num_experts=3, ep_size=2)
    return Plan(
        topology=Topology(ep_size=2),
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=IDENTITY,
        method="test",
    )


def test_each_rank_is_served_by_its_own_copy():
    assert [copies.first().tolist() for copies in rank_copies(copies_plan(), 0)] == [[0, 1, 3]]
    assert [copies.first().tolist() for copies in rank_copies(copies_plan(), 1)] == [[0, 2, 3]]


def test_copies_are_refused_where_sglang_chooses_among_them():
    for algorithm in ("dynamic", "lp", None):
        with pytest.raises(ValueError, match="among the plan's copies by --ep-dispatch-algorithm"):
            check_dispatch(copies_plan(), algorithm)
    check_dispatch(copies_plan(), "static")


def test_sglangs_choice_among_copies_is_replaced():
    metadata = SimpleNamespace(
        physical_to_logical_map_cpu=torch.tensor([[9, 9, 9, 9], [0, 1, 1, 2]]),
        logical_to_rank_dispatch_physical_map=torch.tensor([[7, 7, 7], [0, 1, 3]]),
    )
    check_location(copies_plan(), metadata, [1])
    ChosenCopies().attach(copies_plan(), metadata, [1], rank=1)
    assert metadata.logical_to_rank_dispatch_physical_map.tolist() == [[7, 7, 7], [0, 2, 3]]
    with pytest.raises(ValueError, match="lie elsewhere"):
        check_location(copies_plan(), metadata, [0])
    with pytest.raises(ValueError, match="lie elsewhere"):
        check_location(copies_plan(), None, [1])


def test_copies_are_chosen_token_by_token_where_the_plan_says_so():
    """Experts 0 3 | 1 3 | 2 0 on three ranks: rank 2's tokens with experts 1 and 3 find both on rank 1."""
    slots = np.array([[0, 3, 1, 3, 2, 0]], np.int32)
    layers = torch.zeros((3, 3, 4), dtype=torch.int32)[2]  # SGLang keeps a rank's table among those of all ranks
    placement = Placement(physical_to_logical_map=slots, num_experts=4, ep_size=3, copy_choice="cover")
    plan = replace(copies_plan(), topology=Topology(ep_size=3), placement=placement)
    copies = ChosenCopies()
    copies.attach(plan, SimpleNamespace(logical_to_rank_dispatch_physical_map=layers), [1], rank=2)
    assert layers.tolist() == [[0] * 4, [5, 2, 4, 1], [0] * 4]
    ids = torch.tensor([[1, 3], [0, 3], [-1, -1]], dtype=torch.int32)
    for layer, expected in ((0, "by SGLang"), (1, [[2, 3], [5, 1], [-1, -1]])):
        info = SimpleNamespace(partial_logical_to_rank_dispatch_physical_map=layers[layer, :])
        chosen = copies.choose(lambda ids, info: "by SGLang", ids, info)
        assert (chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen) == expected


def test_arguments_say_the_topology():
    dp = launch.arguments(Topology(ep_size=2, dp_size=2), None, 0, on_cpu=False)
    assert command_line(dp) == [
        "--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention", "--load-balance-method",
        "total_requests", "--moe-a2a-backend", "deepep",
    ]  # fmt: skip
    alone = launch.arguments(Topology(ep_size=1), None, 0, on_cpu=True)
    assert "moe_a2a_backend" not in alone
    assert alone["device"] == "cpu"


def test_what_the_plan_decides_cannot_be_overridden():
    managed = launch.arguments(Topology(ep_size=2), None, 0, on_cpu=True)
    own = ["--dtype", "float32", "--moe-a2a-backend=none", "--attention-backend", "x"]
    words = join(managed, own, launch.DECIDED, "sglang.launch_server")
    assert words[-5:] == own
    assert "--moe-a2a-backend" not in words
    assert words.count("--attention-backend") == 1
    for word in ("--tp-size", "--ep-size=4", "--tp"):
        with pytest.raises(ValueError, match="comes from the plan"):
            join(managed, [word, "4"], launch.DECIDED, "sglang.launch_server")


def serve(tmp_path, monkeypatch, attention, redundant, *options, shuffle="plan", cpu=False, model=str(MODEL)):
    """The words of `semmoe serve` for a plan of the shipped model; cpu: where SGLang runs; model: the one served."""
    monkeypatch.setattr(launch, "on_cpu", lambda: cpu)
    topology = Topology(ep_size=2, dp_size=2 if attention == "dp" else 1)
    plan = vanilla_plan(fingerprint_of(str(MODEL)), topology)
    experts = np.arange(32 + redundant) % 32
    placement = replace(plan.placement, physical_to_logical_map=np.tile(experts, (6, 1)).astype(np.int32))
    tables = SimpleNamespace(by_tables=attention == "tp")
    plan = SimpleNamespace(
        placement=placement,
        tokens=tables,
        requests=SimpleNamespace(by_tables=False),
        topology=topology,
        fingerprint=plan.fingerprint,
    )
    given = PluginSettings(control=str(tmp_path), shuffle=shuffle)
    asked = Asked(model=model, topology=topology, settings=given, host="h", port=1, options=list(options))
    return launch.planned(asked, plan)[1]


def test_passes_over_prompts_are_not_captured_where_tokens_are_shuffled(tmp_path, monkeypatch):
    eager = ["--cuda-graph-backend-prefill", "disabled"]
    words = serve(tmp_path, monkeypatch, "tp", 0)
    assert words[words.index(eager[0]) :][:2] == eager
    for attention, more in (("dp", {}), ("tp", {"shuffle": "off"}), ("tp", {"cpu": True})):
        assert eager[0] not in serve(tmp_path, monkeypatch, attention, 0, **more)
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill comes from the plan"):
        serve(tmp_path, monkeypatch, "tp", 0, "--cuda-graph-backend-prefill", "breakable")
    assert "breakable" in serve(tmp_path, monkeypatch, "dp", 0, "--cuda-graph-backend-prefill", "breakable")


def test_what_takes_the_choice_of_copies_from_the_plan_is_refused(tmp_path, monkeypatch):
    for option in (["--ep-dispatch-algorithm", "dynamic"], ["--ep-dispatch-algorithm=lp"], ["--enable-eplb"]):
        with pytest.raises(ValueError, match=f"{option[0].split('=')[0]} comes from the plan"):
            serve(tmp_path, monkeypatch, "dp", 2, *option)


def test_settings_from_the_environment():
    settings = PluginSettings(plan="p", shuffle="off", control="c")
    assert from_environment(PluginSettings, {**settings.environment(), "PATH": "x"}) == settings
    with pytest.raises(ValueError, match="SEMMOE_PLANN is not a setting"):
        from_environment(PluginSettings, {"SEMMOE_PLANN": "p"})
    with pytest.raises(ValueError, match="SEMMOE_SHUFFLE"):
        from_environment(PluginSettings, {"SEMMOE_SHUFFLE": "sometimes"})


def batch(lengths, prefixes, slots, extend=True):
    """What SGLang's ForwardBatch says of these requests, with two rows of padding."""
    tokens = sum(lengths)
    positions = np.concatenate([np.arange(n) + p for n, p in zip(lengths, prefixes, strict=True)] or [[]])
    padding = torch.zeros(2, dtype=torch.int64)
    mode = SimpleNamespace(
        is_idle=lambda: not lengths, is_decode_or_idle=lambda: not lengths or not extend,
        is_extend_or_draft_extend_or_mixed=lambda: extend,
    )  # fmt: skip
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(lengths), input_ids=torch.arange(tokens), extend_seq_lens_cpu=lengths,
        positions=torch.cat([torch.from_numpy(positions.astype(np.int64)), padding]), extend_prefix_lens_cpu=prefixes,
        req_pool_indices=torch.tensor(slots), rids=[f"r{slot}" for slot in slots],
    )  # fmt: skip


def test_a_mixed_pass_is_read_token_by_token():
    """A new request of 3 tokens, the second chunk of another, and a decoded token."""
    step = read_step(batch([3, 2, 1], [0, 4, 9], [5, 2, 7]))
    assert step.rows.tolist() == [0, 0, 0, 1, 1, 2]
    assert step.positions.tolist() == [0, 1, 2, 4, 5, 9]
    assert step.decoding.tolist() == [False] * 5 + [True]
    assert step.requests == ["r5", "r2", "r7"]
    assert read_step(batch([], [], [])).num_tokens == 0


def test_lengths_that_do_not_add_up_are_not_believed():
    """As those of a pass that verifies a draft, which SGLang does not say: its tokens are nobody's."""
    told = batch([3, 2], [0, 4], [5, 2])
    for lengths in (None, [3, 1]):
        told.extend_seq_lens_cpu = lengths
        step = read_step(told)
        assert (step.guesses, step.num_tokens, step.requests) == (True, 5, [])
        assert step.slots[step.rows].tolist() == [0] * 5
        assert not step.decoding.any()
    assert not read_step(batch([3, 2], [0, 4], [5, 2])).guesses


def test_a_slot_begins_anew_where_tokens_do_not_follow():
    watch = SlotWatch(9, torch.device("cpu"))
    assert begins(watch, read_step(batch([3, 2], [0, 0], [5, 2]))) == [5, 2]
    assert begins(watch, read_step(batch([1, 1], [3, 2], [5, 2], extend=False))) == []  # both go on
    assert begins(watch, read_step(batch([2, 1], [0, 3], [5, 2]))) == [5]  # preempted, or another request
    assert begins(watch, read_step(batch([1], [2], [5], extend=False))) == []
    assert begins(watch, read_step(batch([], [], []))) == []
