"""SGLang's own ForwardBatch in every mode: what is read of it, shuffled and recorded, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from alone import tell
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang.model import prompts
from semmoe.engines.sglang.rank import RankPlugin
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.step import read_step
from semmoe.engines.step import Pass
from semmoe.live.recorder.passes import PassRecorder
from semmoe.plan import load_plan
from semmoe.runtime.shuffler import Shuffler

LAYERS, EXPERTS, TOP_K = 6, 32, 4


def batch(mode, size, per_request, first=40, slots=(3, 5, 9)):
    """`size` requests of `per_request` tokens each, as SGLang builds it for that mode."""
    tokens = size * per_request
    positions = torch.cat([torch.arange(per_request) + first + 7 * r for r in range(size)])
    told = ForwardBatch(
        forward_mode=mode, batch_size=size, input_ids=torch.arange(tokens) + 11, seq_lens=torch.full((size,), first),
        req_pool_indices=torch.tensor(slots[:size]), out_cache_loc=torch.arange(tokens), seq_lens_sum=first * size,
        positions=positions, rids=[f"r{r}" for r in range(size)],
    )  # fmt: skip
    if mode.is_extend_without_speculative():
        told.extend_seq_lens_cpu, told.extend_prefix_lens_cpu = [per_request] * size, [first] * size
    return told


def test_a_pass_that_verifies_a_draft_is_nobodys():
    """SGLang leaves `extend_seq_lens_cpu` unset there."""
    step = read_step(batch(ForwardMode.TARGET_VERIFY, 3, 4))
    assert step.guesses
    assert (step.num_tokens, step.requests, step.slots[step.rows].tolist()) == (12, [], [0] * 12)
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert read_step(batch(mode, 3, 4)).rows.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    decoded = read_step(batch(ForwardMode.DECODE, 3, 1))
    assert (decoded.guesses, decoded.decoding.all(), decoded.slots.tolist()) == (False, True, [3, 5, 9])


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_no_mode_raises(mode):
    """Whatever SGLang sets or leaves unset."""
    told = batch(mode, 2, 1)
    told.rids = None
    read_step(told)
    told.extend_seq_lens_cpu = told.extend_prefix_lens_cpu = None
    read_step(told)
    assert read_step(ForwardBatch(mode, 0, None, None, None, None, 0)).num_tokens == 0


def comm():
    return SimpleNamespace(rank=0, size=2)


def shuffle(plan):
    """The shuffle of a plan, over a stand-in for SGLang's pool of 12 requests."""
    return BoundaryShuffle(Shuffler(plan, 0, 0, "cpu"), comm(), {}, lambda: 12)


def route(shuffle, told, seed):
    """One pass: its slices of every layer, each layer's routing observed as the all-gather would tell it."""
    generator, slices = torch.Generator().manual_seed(seed), []
    shuffle.begin(Pass(lambda: read_step(told), told.forward_mode.is_decode()))
    shuffle._start(len(told.input_ids), told)
    assert shuffle.shuffled
    for layer in range(LAYERS):
        slices.append(shuffle._shuffler.slices(layer).mine.tolist())
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(len(told.input_ids))])
        tell(shuffle._shuffler, layer, ids)
    shuffle.end()
    return slices


def test_drafts_are_shuffled_and_leave_no_trace_in_the_histories_of_requests(plans):
    """Decoded tokens go where they would if no draft had ever been verified."""
    plan = load_plan(plans["tp2"])
    prompt, token = batch(ForwardMode.EXTEND, 2, 6, first=0), batch(ForwardMode.DECODE, 2, 1)
    draft = batch(ForwardMode.TARGET_VERIFY, 2, 4)
    prompt.positions, token.positions = torch.arange(6).repeat(2), torch.tensor([6, 6])
    with_drafts, without = shuffle(plan), shuffle(plan)
    route(with_drafts, prompt, 0)
    drafts = [route(with_drafts, draft, seed) for seed in (1, 2)]
    assert all(len(mine) == 4 for slices in drafts for mine in slices)
    route(without, prompt, 0)
    assert route(with_drafts, token, 3) == route(without, token, 3)


class Listener:
    recording = True

    def __init__(self):
        self.tokens = []

    def observe(self, requests, rows):
        self.tokens += rows.token_ids.tolist()


def test_drafts_are_not_recorded():
    listener = Listener()
    recorder = PassRecorder(listener, 1)
    for mode, size in ((ForwardMode.TARGET_VERIFY, 4), (ForwardMode.DECODE, 1)):
        told = batch(mode, 3, size)
        recorder.begin(Pass(lambda told=told: read_step(told), mode.is_decode()))
        assert recorder.recording == (mode == ForwardMode.DECODE)
        recorder.put(0, torch.zeros((3 * size, TOP_K)))
        recorder.end()
        recorder.tell(slice(None))
    assert listener.tokens == [11, 12, 13]


def plugin(layers=2):
    """A rank's plug-in as `_attach` leaves it, with the model's blocks and one of a draft model."""
    rank = RankPlugin(PluginSettings())
    blocks = [SimpleNamespace(layer_id=layer) for layer in range(layers)]
    rank._blocks, rank._experts_per_rank = {id(block) for block in blocks}, 4
    rank._traffic = Traffic()
    rank._check.expect("experts", layers)
    rank._check.expect("counters", layers)
    return rank, blocks


class Traffic:
    """Counts calls."""

    calls, counts = 0, True

    def count(self, expert_ids, per_rank):
        self.calls += 1


TOPK = SimpleNamespace(topk_ids=torch.zeros((3, 2), dtype=torch.int64), topk_weights=torch.ones(3, 2))


def run(rank, told, blocks, topk=TOPK):
    """A forward pass through `blocks`."""

    def model(runner, forward_batch):
        for block in blocks:
            rank._routed(lambda block, hidden, topk: hidden, block, torch.zeros(3, 4), topk)
        return "logits"

    assert rank._forward(model, SimpleNamespace(is_draft_worker=False), told) == "logits"


def test_a_draft_models_experts_are_not_counted():
    rank, blocks = plugin()
    rank._routed(lambda *call: None, SimpleNamespace(layer_id=0), torch.zeros(3, 4), TOPK)
    assert rank._traffic.calls == 0
    run(rank, batch(ForwardMode.EXTEND, 1, 3), blocks)
    assert rank._traffic.calls == 2


def test_the_first_pass_over_a_prompt_tells_whether_hooks_run(caplog):
    rank, blocks = plugin()
    run(rank, batch(ForwardMode.DECODE, 3, 1), [])  # may be replayed from a graph
    run(rank, batch(ForwardMode.IDLE, 1, 1), blocks)  # keeps step with another rank
    run(rank, batch(ForwardMode.TARGET_VERIFY, 3, 4), [])
    assert rank._check.pending
    run(rank, batch(ForwardMode.EXTEND, 3, 4), blocks)
    assert (rank._check.pending, rank._check.reasons) == (False, [])


@pytest.mark.parametrize(
    ("seen", "topk", "said"),
    [
        (0, TOPK, "experts 0 of 2 times, counters 0 of 2 times"),
        (2, SimpleNamespace(), "counters 0 of 2 times"),  # SGLang's fused routers tell no ids
    ],
)
def test_hooks_that_do_not_run_are_said(caplog, seen, topk, said):
    rank, blocks = plugin()
    for _ in range(2):
        run(rank, batch(ForwardMode.EXTEND, 3, 4), blocks[:seen], topk)
    found = [reading for reading in rank._check.readings()]
    assert found == [("degraded", {"reason": f"in the first pass hooks ran: {said}"}, 1.0)]
    assert caplog.text.count("semmoe: degraded") == 1


def test_which_passes_are_over_prompts():
    over = {mode for mode in ForwardMode if prompts(batch(mode, 1, 1))}
    assert {ForwardMode.EXTEND, ForwardMode.MIXED} <= over
    assert not over & {ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2}


def test_step_arrays_are_whole():
    step = read_step(batch(ForwardMode.TARGET_VERIFY, 2, 5))
    assert all(len(a) == 10 for a in (step.token_ids, step.positions, step.rows, step.decoding))
    assert np.isin(step.slots, [0]).all()
