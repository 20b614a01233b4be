"""Look-ahead: what a layer's router names one step ahead, from the profile to the ranks of a live model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import build
from synthetic import random_trace
from test_generate import EASY, SETTINGS, prompts

from semmoe.core import PREFILL
from semmoe.engines.layer import TokenRows
from semmoe.engines.lookahead import Lookahead, asking_for, gate_of, logits_of
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import model as models
from semmoe.engines.transformers import verify
from semmoe.engines.transformers.config import fingerprint_of, lookahead_planes
from semmoe.engines.transformers.recorder import record
from semmoe.plan import load_plan, save_plan
from semmoe.replayer import replay
from semmoe.settings import PredictorSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.trace import open_trace, save_trace

LOOKING = PredictorSettings(lookahead=True)
FOUR = Topology(ep_size=4)
OTHERS = ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe")
SLOW_OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def named_by(trace, ids):
    """The trace with look-ahead `ids` (T, L - 1, W)."""
    return replace(trace, lookahead_ids=ids.astype(np.uint8))


def random_names(trace, seed=0):
    rng, (tokens, layers, top_k) = np.random.default_rng(seed), trace.expert_ids.shape
    order = np.argsort(rng.random((tokens, layers - 1, trace.fingerprint.num_experts)), axis=2)
    return order[..., : 2 * top_k]


def test_a_router_asked_for_more_is_the_same_router():
    """Worked by hand: weights sum to one over what is chosen, and a hook on the router sees its own calls alone."""

    class Router(torch.nn.Module):
        top_k = 1

        def forward(self, logits):
            return logits.softmax(dim=1).topk(self.top_k)

    router, seen = Router(), []
    router.register_forward_hook(lambda *call: seen.append(call))
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert router(logits).indices.tolist() == [[1]]
    assert asking_for(router, 3)(logits).indices.tolist() == [[1, 3, 2]]
    assert (router.top_k, len(seen)) == (1, 1)


def test_ids_are_by_falling_weight_and_there_are_none_after_the_last_layer():
    ahead = Lookahead([lambda rows: (torch.tensor([[5, 6, 7]]), torch.tensor([[0.2, 0.5, 0.3]]))], 3)
    assert ahead(0, torch.zeros(1, 4)).tolist() == [[6, 7, 5]]
    assert ahead(1, torch.zeros(1, 4)).shape == (1, 0)
    assert ahead(0, torch.zeros(0, 4)).shape == (0, 3)


def test_a_block_without_a_known_gate_is_refused():
    with pytest.raises(ValueError, match="Linear has no gate that can be asked ahead of time"):
        gate_of(torch.nn.Linear(1, 1))
    assert logits_of(lambda rows: (rows + 1, None), torch.zeros(1, 2)).tolist() == [[1, 1]]


@pytest.mark.parametrize("architecture", ["qwen3_moe", *SLOW_OTHERS])
def test_recorded_ids_are_what_the_router_makes_of_the_stream_before_attention(architecture, checkpoints, tmp_path):
    """Prompts of uneven lengths in one batch, each again alone; the first K are the router's own choice there."""
    path = build(architecture, checkpoints)
    model, top_k = models.load_model(path), fingerprint_of(path).top_k
    trace = record(model, path, prompts(0, 6), tmp_path / "trace", lookahead=True)
    assert trace.lookahead == 2
    blocks = {id(block): i for i, block in enumerate(models.moe_layers(model))}
    layers = [(at, layer) for at, layer in enumerate(models.decoder_layers(model)) if id(layer.mlp) in blocks]
    for r, prompt in enumerate(prompts(0, 6)):
        with torch.no_grad():
            streams = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        found = trace.lookahead_ids[trace.rows(r)]
        for place in range(1, len(layers)):
            layer, stream = layers[place][1], streams[layers[place - 1][0] + 1][0]
            router = getattr(layer.mlp, "gate", None) or layer.mlp.router
            with torch.no_grad():
                _, weights, ids = router(layer.post_attention_layernorm(stream))
            expected = ids.gather(1, weights.argsort(dim=1, descending=True)).numpy()
            agree = (np.sort(found[:, place - 1, :top_k]) == np.sort(expected)).all(axis=1)
            assert agree.mean() >= 0.95  # batches of other shapes may turn a near-tie
            assert all(len(set(row)) == 2 * top_k for row in found[:, place - 1].tolist())


def test_a_model_whose_residual_is_a_stack_of_streams_is_refused_before_it_is_loaded(checkpoints):
    path = build("deepseek_v4", checkpoints)
    with pytest.raises(ValueError, match="a stack of streams, which no router reads ahead: omit --lookahead"):
        lookahead_planes(path, fingerprint_of(path))


def test_a_model_of_one_moe_layer_has_nothing_to_look_ahead_to(checkpoints):
    path = build("qwen3_moe", checkpoints)
    one = replace(fingerprint_of(path), num_layers=1)
    with pytest.raises(ValueError, match="one MoE layer, and none to look ahead to: omit --lookahead"):
        lookahead_planes(path, one)
    assert lookahead_planes(path, replace(one, num_layers=2)) == 2
    assert lookahead_planes(path, replace(one, num_layers=2, num_experts=3)) == 1


def test_ids_come_back_from_disk_request_by_request(tmp_path):
    trace = random_trace(0)
    trace = named_by(trace, random_names(trace))
    save_trace(trace, tmp_path / "trace")
    back = open_trace(tmp_path / "trace")
    np.testing.assert_array_equal(back.lookahead_ids, trace.lookahead_ids)
    assert back.digest() == trace.digest() != replace(trace, lookahead_ids=None).digest()
    some = np.array([7, 2])
    rows = np.concatenate([np.arange(trace.num_tokens)[trace.rows(r)] for r in some])
    np.testing.assert_array_equal(trace.select(some).lookahead_ids, trace.lookahead_ids[rows])
    np.savez(tmp_path / "plain.npz", **{name: vars(trace)[name] for name in
             ("token_ids", "expert_ids", "request_offsets", "lookahead_ids")})  # fmt: skip
    np.testing.assert_array_equal(open_trace(tmp_path / "plain.npz").lookahead_ids, trace.lookahead_ids)


def test_a_trace_of_before_is_read_as_one_without(tmp_path):
    save_trace(random_trace(0), tmp_path / "trace")
    header = tmp_path / "trace" / "trace.json"
    text = header.read_text()
    header.write_text(text.replace('"schema_version": 2', '"schema_version": 1').replace(',\n "lookahead": 0', ""))
    assert header.read_text() != text
    assert open_trace(tmp_path / "trace").lookahead == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ids: ids[..., :3], r"shape \(\d+, 2, 3\), expected \(\d+, 2, 2 or 4\)"),
        (lambda ids: ids[:, :1], r"expected"),
        (lambda ids: ids[:-1], r"expected"),
        (lambda ids: ids + 200, "look-ahead expert id 2.. is out of range for 8 experts"),
        (lambda ids: ids.astype(np.float32), "expected integers"),
        (lambda ids: np.float32(1.0), "expected"),
    ],
)
def test_ids_that_do_not_fit_the_trace_are_refused(change, told):
    trace = random_trace(0)
    ids = random_names(trace).astype(np.uint8)
    with pytest.raises(ValueError, match=told):
        replace(trace, lookahead_ids=change(ids))


def test_what_is_known_ahead_is_used_and_noise_is_not():
    """Experts that nothing else foretells: named ahead, all are found; with random names nothing is gained."""
    trace = random_trace(0, requests=120, layers=3, vocab=400)
    rng = np.random.default_rng(1)
    experts = np.argsort(rng.random((trace.num_tokens, 3, 8)), axis=2)[..., :2].astype(np.uint8)
    trace = replace(trace, expert_ids=experts, phase=np.full(trace.num_tokens, PREFILL, np.uint8))
    true = np.concatenate([experts[:, 1:], (experts[:, 1:] + 1) % 8], axis=2)
    plain = replay(trace, solve(trace, FOUR, SolveSettings(**EASY))).layers
    asked = SolveSettings(predictor=LOOKING, **EASY)
    known = replay(named_by(trace, true), solve(named_by(trace, true), FOUR, asked)).layers
    noise = named_by(trace, random_names(trace))
    none = replay(noise, solve(noise, FOUR, asked)).layers
    assert all(a.lar - b.lar > 0.15 for a, b in zip(known[1:], plain[1:], strict=True))
    assert abs(known[0].lar - plain[0].lar) < 0.06  # of other placements, by luck
    assert all(abs(a.lar - b.lar) < 0.06 for a, b in zip(none, plain, strict=True))


def test_settings_that_would_have_no_effect_are_refused():
    trace = random_trace(0, requests=20)
    with pytest.raises(ValueError, match="no look-ahead ids: make it with `semmoe profile --lookahead`"):
        solve(trace, FOUR, SolveSettings(predictor=LOOKING))
    named = named_by(trace, random_names(trace))
    with pytest.raises(ValueError, match="no effect with attention-DP"):
        solve(named, Topology.for_attention("dp", 4), SolveSettings(predictor=LOOKING))
    plan = solve(named, FOUR, SolveSettings(predictor=LOOKING, **EASY))
    with pytest.raises(ValueError, match="the plan reads 2 look-ahead ids per expert chosen and the trace has none"):
        replay(trace, plan)


def test_a_plan_that_reads_fewer_ids_than_a_trace_has_reads_the_first():
    trace = random_trace(0, requests=20)
    ids = random_names(trace)
    narrow, wide = named_by(trace, ids[..., :2]), named_by(trace, ids)
    plan = solve(narrow, FOUR, SolveSettings(predictor=LOOKING, **EASY))
    assert (plan.tokens.lookahead, wide.lookahead) == (1, 2)
    assert replay(wide, plan).as_dict() == replay(narrow, plan).as_dict()


def test_a_plan_says_what_it_looks_at_and_one_of_before_looks_at_nothing(tmp_path):
    trace = random_trace(0, requests=20)
    plan = solve(named_by(trace, random_names(trace)), FOUR, SolveSettings(predictor=LOOKING, **EASY))
    save_plan(plan, tmp_path / "plan")
    assert load_plan(tmp_path / "plan").tokens.looks == plan.tokens.looks
    save_plan(solve(trace, FOUR, SolveSettings(**EASY)), tmp_path / "older")
    header = tmp_path / "older" / "plan.json"
    assert ',\n  "lookahead": 0' in header.read_text()
    older = header.read_text().replace(',\n  "lookahead": 0', "")
    header.write_text(older.replace('"schema_version": 3', '"schema_version": 2'))
    assert load_plan(tmp_path / "older").tokens.lookahead == 0


def live(path, plan, attach=None):
    """What four ranks generate on a plan, and the LAR."""
    return gen.generate(path, prompts(1), [gen.Configuration(name="x", plan=plan, attach=attach)], SETTINGS)[0]


def blind(model, set_up, comm):
    """Every router says the same of all tokens, on all ranks."""
    attached = gen._attach(model, set_up, comm)
    width = 2 * set_up.plan.fingerprint.top_k
    same = [lambda rows: (torch.arange(width).expand(len(rows), -1), torch.ones(len(rows), width))] * 2
    attached.rows._lookahead = Lookahead(same, width)
    return attached


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", *OTHERS])
def test_live_outputs_are_the_plain_models_and_names_only_move_tokens(architecture, checkpoints, tmp_path):
    """Also where the names are wrong, which costs locality and no output."""
    path = build(architecture, checkpoints)
    model = models.load_model(path)
    trace = record(model, path, prompts(0, 24), tmp_path / "trace", lookahead=True)
    reference = verify.plain_generate(model, prompts(1), SETTINGS)
    plan = solve(trace, FOUR, SolveSettings(predictor=LOOKING, **EASY))
    plain = solve(trace, FOUR, SolveSettings(**EASY))
    plain = replace(plain, placement=plan.placement)
    looking, without, wrong = live(path, plan), live(path, plain), live(path, plan, blind)
    for result in (looking, without, wrong):
        assert verify.compare_outputs(model, prompts(1), reference, result.outputs).holds
    assert looking.lar > wrong.lar
    tokens, layers = looking.forward_tokens, trace.fingerprint.num_layers
    ids = 2 * trace.fingerprint.top_k  # a byte each, sent to three other ranks for every layer but the first
    more = looking.sent_bytes["all_gather"] - without.sent_bytes["all_gather"]
    assert more == 3 * tokens * ids * (layers - 1)


def test_ranks_agree_without_computing_alike():
    """A rank's own answers travel, so that no rank has to find another's: every token's plane is its owner's."""
    told = []

    class Shuffler:
        uses_history, lookahead = True, 1

        def by_weight(self, ids, weights):
            return ids.to(torch.uint8)

        def observe(self, layer, ids):
            told.append(ids.tolist())

    class Gathers(TokenRows):
        def _gather_rows(self, columns):
            return [torch.cat([column, column + 10 if i else column]) for i, column in enumerate(columns)]

    rows = Gathers(Shuffler(), None, Lookahead([lambda r: (torch.tensor([[3, 4]]), torch.tensor([[0.6, 0.4]]))], 2))
    rows._layer, rows._padded, rows._tokens, rows._handle = 0, 2, 2, object()
    rows.observe(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))
    rows.restore(torch.zeros(1, 4))
    assert told == [[[1, 2, 3, 4], [11, 12, 13, 14]]]
