"""The stand-in for DeepEP that engines run with on a CPU: its interface, and rows on real gloo processes."""

import inspect
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

STAND_IN = Path(__file__).parent.parent / "engines" / "deep-ep-cpu"
sys.path.append(str(STAND_IN))  # at the end: a real deep_ep would be found first

import deep_ep  # noqa: E402
from deep_ep.counts import totals  # noqa: E402
from deep_ep.scales import as_exponents, cast  # noqa: E402

INTERFACE = json.loads((Path(__file__).parent / "deep_ep_interface.json").read_text())
RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 4, 16, 3, 2048, 12
SIZE = EXPERTS // RANKS


@pytest.mark.parametrize("name", INTERFACE["methods"])
def test_methods_take_what_deep_eps_take(name):
    """Names, order and defaults, so that an engine's call that DeepEP would refuse is refused here."""
    kind, method = name.split(".")
    parameters = inspect.signature(getattr(getattr(deep_ep, kind), method)).parameters
    found = [[p.name] if p.default is p.empty else [p.name, p.default] for p in parameters.values() if p.name != "self"]
    assert found == INTERFACE["methods"][name]


def test_handles_have_the_fields_that_engines_read():
    assert set(INTERFACE["handle"]) <= set(deep_ep.EPHandle.__dataclass_fields__)


def tokens(rank, num_ranks=RANKS):
    """Rows, choices with some missing and a token without any, weights; another number of tokens on every rank."""
    rng = torch.Generator().manual_seed(rank)
    n = [MOST, 5, 0, 9][rank % 4]
    x = torch.randn(n, HIDDEN, generator=rng).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(n)] or [torch.empty(0, TOP_K)])
    ids = ids.reshape(n, TOP_K).long()
    ids[torch.rand(n, TOP_K, generator=rng) < 0.2] = -1
    ids[:1] = -1
    return x, ids, torch.rand(n, TOP_K, generator=rng)


def expert(rows, ids):
    """What expert e makes of a row, for ids that are global."""
    return rows.float() * (ids.float() + 1)[:, None]


def expected(x, ids, weights):
    """The weighted sum over a token's experts."""
    pairs = torch.where(ids >= 0, weights * (ids + 1), 0.0)
    return x.float() * pairs.sum(1)[:, None]


def close(found, wanted):
    """To what bfloat16 rows, each rounded twice on the way, can be."""
    torch.testing.assert_close(found.float(), wanted, rtol=0.03, atol=0.1)


def in_nodes_of(size):
    os.environ["DEEP_EP_CPU_NODE_SIZE"] = str(size)


def sent(ids, rank, node=RANKS):
    """Rows that leave the rank: by pair, and at most one for each rank and node."""
    owner = torch.where(ids >= 0, ids // SIZE, -1)
    ranks = {(t, int(o)) for t, row in enumerate(owner) for o in row if o >= 0 and o != rank}
    nodes = {(t, o // node) for t, o in ranks if o // node != rank // node}
    return int(((owner >= 0) & (owner != rank)).sum()), len(ranks), len(nodes)


def normal(comm, node):
    in_nodes_of(node)
    x, ids, weights = tokens(comm.rank)
    buffer = deep_ep.Buffer(comm.group, 1 << 20, 0)
    per_rank, per_node, per_expert, inside, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, own, w, counts, handle, event = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=inside,
        num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights, expert_alignment=4,
    )  # fmt: skip
    assert event.event is None
    assert (per_node is None) == (node == RANKS)
    assert ((own >= -1) & (own < SIZE)).all()
    assert (own >= 0).any(1).all(), "a row came that no expert here wants"
    assert (w[own < 0] == 0).all()
    real = torch.bincount(own[own >= 0], minlength=SIZE)
    assert counts == ((real + 3) // 4 * 4).tolist()
    out = sum(torch.where(own[:, k] >= 0, w[:, k], 0.0)[:, None] * expert(rows, own[:, k] + comm.rank * SIZE)
              for k in range(TOP_K))  # fmt: skip
    combined, back, _ = buffer.combine(out.bfloat16(), handle, topk_weights=w)
    close(combined, expected(x, ids, weights))
    torch.testing.assert_close(back, torch.where(ids >= 0, weights, 0.0))
    again, *_ = buffer.dispatch(x, handle=handle)
    assert torch.equal(again, rows)
    return len(rows), buffer.counts["ranks"], buffer.counts["nodes"]


def normal_on_one_node(comm):
    return normal(comm, RANKS)


def normal_on_two_nodes(comm):
    return normal(comm, RANKS // 2)


def test_normal_mode_sends_a_row_to_each_rank(tmp_path):
    found = on_ranks(RANKS, normal_on_one_node, tmp_path)
    for rank, (_, ranks, nodes) in enumerate(found):
        assert ranks == 2 * sent(tokens(rank)[1], rank)[1]  # the cached dispatch sent them again
        assert nodes == 0
    assert sum(rows for rows, _, _ in found) == sum(
        own_rows(rank) + sent(tokens(rank)[1], rank)[1] for rank in range(RANKS)
    )


def own_rows(rank):
    return int((tokens(rank)[1] // SIZE == rank).any(1).sum())


def test_normal_mode_sends_a_row_to_each_node_and_forwards_it(tmp_path):
    for rank, (_, _, nodes) in enumerate(on_ranks(RANKS, normal_on_two_nodes, tmp_path)):
        assert nodes == 2 * sent(tokens(rank)[1], rank, RANKS // 2)[2]


def low_latency(comm):
    x, ids, weights = tokens(comm.rank)
    buffer = deep_ep.Buffer(comm.group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=SIZE)
    statistics = torch.zeros(SIZE, dtype=torch.int32)
    rows, count, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=statistics, use_fp8=False, return_recv_hook=True
    )
    assert rows.isnan().all(), "rows stand there before the hook was called"
    hook()
    assert rows.shape == (SIZE, MOST * RANKS, HIDDEN)
    assert torch.equal(count, statistics)
    for e in range(SIZE):
        assert not rows[e, : count[e]].isnan().any()
        assert rows[e, count[e] :].isnan().all(), "what is no token may not be readable"
    out = rows * (torch.arange(SIZE) + comm.rank * SIZE + 1)[:, None, None]
    combined, _, none = buffer.low_latency_combine(out.bfloat16(), ids, weights, handle)
    assert none is None
    close(combined, expected(x, ids, weights))
    return buffer.counts["pairs"]


def test_low_latency_mode_sends_a_row_to_each_expert(tmp_path):
    for rank, pairs in enumerate(on_ranks(RANKS, low_latency, tmp_path)):
        assert pairs == sent(tokens(rank)[1], rank)[0]


def low_latency_in_float8(comm):
    x, ids, weights = tokens(comm.rank)
    buffer = deep_ep.Buffer(comm.group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=SIZE)
    (rows, scales), count, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
    assert rows.dtype == torch.float8_e4m3fn
    assert scales.shape == (SIZE, MOST * RANKS, HIDDEN // 128)
    assert scales.stride()[-2] == 1, "scales must be column-major"
    plain = (rows.float().unflatten(2, (-1, 128)) * scales[..., None]).flatten(2)
    for e in range(SIZE):
        plain[e, count[e] :] = 0
    out = plain * (torch.arange(SIZE) + comm.rank * SIZE + 1)[:, None, None]
    combined, _, _ = buffer.low_latency_combine(out.bfloat16(), ids, weights, handle)
    torch.testing.assert_close(combined.float(), expected(x, ids, weights), rtol=0.1, atol=1.0)
    (_, packed), *_ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, round_scale=True, use_ue8m0=True)
    assert packed.dtype == torch.int32
    assert packed.shape == (SIZE, MOST * RANKS, HIDDEN // 512)


def test_low_latency_mode_in_float8(tmp_path):
    on_ranks(RANKS, low_latency_in_float8, tmp_path)


def test_scales_that_are_powers_of_two():
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    rows, scale = cast(x, power_of_two=True)
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    exponents = as_exponents(scale).view(torch.uint8).reshape(scale.shape)
    assert torch.equal(torch.exp2(exponents.float() - 127), scale)
    torch.testing.assert_close(
        (rows.float().view(3, 8, 128) * scale[:, :, None]).view(3, 1024), x, rtol=0.07, atol=0.02
    )


def low_latency_after_normal(comm):
    x, ids, weights = tokens(comm.rank)
    buffer = deep_ep.Buffer(comm.group, 1 << 20, 1 << 20, low_latency_mode=True, num_qps_per_rank=SIZE)
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=inside, num_tokens_per_expert=per_expert,
                    topk_idx=ids, topk_weights=weights)  # fmt: skip
    with pytest.raises(AssertionError, match="clean"):
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)


def test_a_buffer_must_be_cleaned_between_the_modes(tmp_path):
    on_ranks(2, low_latency_after_normal, tmp_path)


def elastic(comm, expand, synchronous):
    x, ids, weights = tokens(comm.rank)
    buffer = deep_ep.ElasticBuffer(comm.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K)
    rows, own, w, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS, expert_alignment=8,
                                              do_cpu_sync=synchronous, do_expand=expand)  # fmt: skip
    came = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert bool(handle.num_recv_tokens_per_expert_list) == synchronous
    if expand:
        assert own is None
        psum, counts = handle.psum_num_recv_tokens_per_expert, handle.num_unaligned_recv_tokens_per_expert
        out = torch.full_like(rows, torch.nan)
        for e in range(SIZE):
            here = slice(int(psum[e] - counts[e]), int(psum[e]))
            assert here.start % 8 == 0
            assert not rows[here].isnan().any()
            out[here] = (expert(rows[here], torch.full((counts[e],), e + comm.rank * SIZE)) * w[here, None]).bfloat16()
    else:
        assert len(rows) == (came if synchronous else MOST * RANKS)
        assert rows[came:].isnan().all()
        own, w = own[:came], w[:came]
        out = torch.full_like(rows, torch.nan)
        pairs = [torch.where(own[:, k] >= 0, w[:, k], 0.0)[:, None] * expert(rows[:came], own[:, k] + comm.rank * SIZE)
                 for k in range(TOP_K)]  # fmt: skip
        out[:came] = sum(pairs).bfloat16()
    combined, _, _ = buffer.combine(out, handle)
    close(combined, expected(x, ids, weights))
    return buffer.counts["ranks"]


def elastic_as_they_come(comm):
    return [elastic(comm, False, True), elastic(comm, False, False)]


def elastic_expanded(comm):
    return [elastic(comm, True, True), elastic(comm, True, False)]


@pytest.mark.parametrize("job", [elastic_as_they_come, elastic_expanded])
def test_the_elastic_buffer_sends_a_row_to_each_rank(job, tmp_path):
    for rank, counted in enumerate(on_ranks(RANKS, job, tmp_path)):
        assert counted == [sent(tokens(rank)[1], rank)[1]] * 2


def test_counts_are_in_files_while_processes_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert totals(tmp_path) == {"pairs": 0, "ranks": 0, "nodes": 0}
    pairs = on_ranks(2, counting_on_two, tmp_path)
    assert totals(tmp_path) == {"pairs": sum(pairs), "ranks": 0, "nodes": 0}


def counting_on_two(comm):
    os.environ["DEEP_EP_CPU_COUNTS"] = str(Path.cwd())
    x, ids, _ = tokens(comm.rank)
    buffer = deep_ep.Buffer(comm.group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=SIZE)
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    return buffer.counts["pairs"]


def refusing(comm):
    buffer = deep_ep.Buffer(comm.group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=SIZE)
    x, ids, _ = tokens(0)
    for rows, choices, most, words in (
        (x.float(), ids, MOST, "bfloat16"),
        (x[:, :192].contiguous(), ids, MOST, "hidden size of 192"),
        (x, ids.int(), MOST, "int64"),
        (x, ids, 3, "at most 3"),
    ):
        with pytest.raises(AssertionError, match=words):
            buffer.low_latency_dispatch(rows, choices, most, EXPERTS)


def test_what_deep_ep_refuses_is_refused(tmp_path):
    on_ranks(1, refusing, tmp_path)


def test_nodes_must_divide_the_ranks(monkeypatch):
    from deep_ep.counts import node_size

    monkeypatch.setenv("DEEP_EP_CPU_NODE_SIZE", "3")
    with pytest.raises(ValueError, match="does not divide 4"):
        node_size(4)
    assert node_size(6) == 3
