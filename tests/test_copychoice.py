"""The rules of the copy choice: against loops, in every implementation, and what they must never do."""

import numpy as np
import oracles
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import random_placement
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.core import Placement, Plan
from semmoe.costs.metrics import layer_traffic
from semmoe.requests.policy import RoundRobin
from semmoe.runtime.copies import place_experts, rank_copies
from semmoe.runtime.kernels import on_cpu
from semmoe.tokens.copychoice import CopyChoice, copy_choice, preferred_copies
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

SIZES = st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (6, 3)])
SHARES = st.sampled_from([0.0, 0.3, 1.0])  # of pairs of source rank and expert that use the preferred copy alone
IDENTITY = Fingerprint(
    model="test", architecture_hash="a", tokenizer_hash="b", num_layers=2, num_experts=4, top_k=2, vocab_size=9
)


def placed(seed: int, sizes: tuple[int, int], rule: str, fixed: float = 0.0):
    """(placement, topology, rng): at random, with two layers, up to four copies of an expert, a preferred one for every
    source, and a share `fixed` of the pairs of source and expert that use no other.
    """
    rng, (ep_size, nodes) = np.random.default_rng(seed), sizes
    topology = Topology(ep_size=ep_size, num_nodes=nodes)
    bare = random_placement(rng, ep_size, per_rank=4)
    table = np.array(
        [
            [
                [rng.choice(sorted(oracles.nearest_ranks(bare, topology, l, g, e))) for e in range(bare.num_experts)]
                for g in range(ep_size)
            ]
            for l in range(2)
        ]
    )
    placement = Placement(
        physical_to_logical_map=bare.physical_to_logical_map,
        num_experts=bare.num_experts,
        ep_size=ep_size,
        static_dispatch=table.astype(np.int16),
        copy_choice=rule,
        fixed_copies=rng.random(table.shape) < fixed if fixed else None,
    )
    return placement, topology, rng


def plan_of(placement: Placement, topology: Topology) -> Plan:
    return Plan(
        topology=topology,
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=IDENTITY,
        method="test",
    )


def tokens(rng, placement: Placement, number: int) -> tuple[np.ndarray, np.ndarray]:
    K = int(rng.integers(1, min(placement.num_experts, 8) + 1))
    experts = np.array([rng.permutation(placement.num_experts)[:K] for _ in range(number)])
    return experts, rng.integers(placement.ep_size, size=number)


def test_ranks_that_are_reached_anyway_compute_what_they_hold():
    """Experts 0 to 3 at home on ranks 0 to 3; expert 4 on ranks 1 and 2, expert 5 on ranks 2 and 3, 4 preferred on 1.

    A token of rank 0 with experts 2, 4, 5 reaches rank 2 for expert 2, which holds the others too. With experts 4, 5,
    rank 2 holds most. With 4 alone, the preferred copy decides.
    """
    copies = np.array([[0, -1], [1, -1], [2, -1], [3, -1], [1, 2], [2, 3]], np.int16)
    preferred = np.array([[0, 1, 2, 3, 1, 3]] * 4, np.int16)
    rule = CopyChoice(preferred, copies, np.zeros(4, np.int64))
    home = np.zeros(1, np.int64)
    assert rule.ranks(np.array([[2, 4, 5]]), home).tolist() == [[2, 2, 2]]
    assert rule.ranks(np.array([[0, 4, 5]]), home).tolist() == [[0, 2, 2]]
    assert rule.ranks(np.array([[4]]), home).tolist() == [[1]]
    assert rule.ranks(np.array([[1, 3, 5]]), home).tolist() == [[1, 3, 3]]
    assert CopyChoice(preferred).ranks(np.array([[2, 4, 5]]), home).tolist() == [[2, 1, 3]]


@given(st.integers(0, 9999), SIZES, SHARES)
def test_cover_agrees_with_loops(seed, sizes, fixed):
    placement, topology, rng = placed(seed, sizes, "cover", fixed)
    experts, home = tokens(rng, placement, 20)
    for l, rule in enumerate(copy_choice(placement, topology)):
        expected = [
            oracles.cover(placement, topology, l, int(source), row) for row, source in zip(experts, home, strict=True)
        ]
        assert rule.ranks(experts, home).tolist() == expected


@given(st.integers(0, 9999), SIZES)
def test_no_token_reaches_more_ranks_than_by_the_static_rule_in_the_mean(seed, sizes):
    """Every pair is computed by one of the nearest copies; local pairs are the same; and rows are fewer."""
    placement, topology, rng = placed(seed, sizes, "cover")
    experts, home = tokens(rng, placement, 300)
    for l, rule in enumerate(copy_choice(placement, topology)):
        targets = rule.ranks(experts, home)
        for row, source, ranks in zip(experts[:20], home, targets, strict=False):
            for e, rank in zip(row, ranks, strict=True):
                assert rank in oracles.nearest_ranks(placement, topology, l, source, e)
        static = CopyChoice(rule.preferred).ranks(experts, home)
        cover, before = (layer_traffic(t, home, topology.ep_size) for t in (targets, static))
        assert cover.local_pairs == before.local_pairs
        assert cover.rows.sum() <= before.rows.sum()


@given(st.integers(0, 9999), SIZES, st.sampled_from(["static", "cover"]), SHARES)
def test_engines_choose_the_same_copies_as_replay(seed, sizes, rule, fixed):
    placement, topology, rng = placed(seed, sizes, rule, fixed)
    experts, _ = tokens(rng, placement, 12)
    choice = copy_choice(placement, topology)
    for source in range(topology.ep_size):
        for l, copies in enumerate(rank_copies(plan_of(placement, topology), source)):
            ids = torch.from_numpy(np.concatenate([experts, np.full((1, experts.shape[1]), -1)]))
            physical = copies.to_physical(ids.to(torch.int32))
            assert physical.dtype == torch.int32
            assert (physical[-1] == -1).all()
            held = physical[:-1].numpy()
            assert (placement.physical_to_logical_map[l][held] == experts).all()
            home = np.full(len(experts), source)
            assert (held // placement.experts_per_rank == choice[l].ranks(experts, home)).all()


@pytest.mark.parametrize(("rule", "fixed"), [("static", False), ("cover", False), ("cover", True)])
def test_of_two_copies_on_a_rank_the_first_is_used(rule, fixed):
    """Slots 0 to 3 on rank 0, 4 to 7 on rank 1: expert 1 is twice on rank 0, expert 2 twice on rank 1 and once on 0."""
    placement = Placement(
        physical_to_logical_map=np.array([[0, 1, 1, 2, 3, 2, 2, 0]]), num_experts=4, ep_size=2, copy_choice=rule,
        fixed_copies=np.full((1, 2, 4), fixed),
    )  # fmt: skip
    plan, ids = plan_of(placement, Topology(ep_size=2)), torch.tensor([[0, 1, 2, 3]])
    for source, physical in enumerate(([0, 1, 3, 4], [7, 1, 5, 4])):
        (copies,) = rank_copies(plan, source)
        assert copies.ranks.shape == copies.physical.shape == (4, 1)
        assert copies.first().tolist() == physical
        assert copies.to_physical(ids).tolist() == [physical]


def test_which_copy_each_of_eight_ranks_on_two_nodes_uses_by_hand():
    """Expert 0 on ranks 1, 3 and 6; expert 1 on ranks 4 and 5; the others on one rank each."""
    rows = [[2, 3], [0, 4], [5, 6], [0, 7], [1, 8], [1, 9], [0, 10], [11, 12]]
    placement = Placement(physical_to_logical_map=np.array(rows).reshape(1, -1), num_experts=13, ep_size=8)
    topology = Topology(ep_size=8, dp_size=8, num_nodes=2)
    found = preferred_copies(placement, topology)[0]
    assert found[:, 0].tolist() == [1, 1, 3, 3, 6, 6, 6, 6]
    assert found[:, 1].tolist() == [4, 5, 4, 5, 4, 5, 4, 5]
    assert found[:, 7].tolist() == [3] * 8


COUNTED = (
    (1, 1, 1, None), (7, 4, 2, 5), (200, 12, 3, 200), (300, 512, 64, None), (9, 8, 1, 0), (5, 8, 8, 9),
)  # fmt: skip


def check_count(kernels, rows: int, ranks: int, nodes: int, real: int | None) -> None:
    """Counts are added to the totals so far."""
    rng = np.random.default_rng(rows)
    ids = torch.from_numpy(rng.integers(-1, 3 * ranks, (rows, 5)).astype(np.int32))
    bound = None if real is None else torch.tensor([real])
    totals, theirs = (torch.full((2 * ranks + nodes + 1,), start) for start in (7, 0))
    kernels.count(ids, totals, ranks, 3, ranks // nodes, bound)
    reference.count(ids, theirs, ranks, 3, ranks // nodes, bound)
    assert torch.equal(totals - 7, theirs)


def check_place(kernels, ids: torch.Tensor, tables: list[torch.Tensor], source: int, num_ranks: int) -> None:
    """Uncounted, counted, and with the first third of the rows counted; a node has one rank, or all."""
    for width, real in ((0, None), (1, None), (num_ranks, torch.tensor([len(ids) // 3]))):
        size = 2 * num_ranks + num_ranks // width + 1 if width else 0
        totals, theirs = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        sizes = num_ranks, -(-int(tables[1].max() + 1) // num_ranks), max(width, 1), real
        ours = kernels.place(ids, tables, source, totals, *sizes)
        assert ours.dtype == ids.dtype
        assert torch.equal(ours, reference.place(ids, tables, source, theirs, *sizes))
        assert torch.equal(totals, theirs)


def check_implementations(kernels) -> None:
    """Few ranks and many, few experts of a token and many, unknown ids, an empty batch."""
    for counted in COUNTED:
        check_count(kernels, *counted)
    for seed, sizes in enumerate([(1, 1), (4, 1), (8, 2), (6, 3), (16, 1)]):
        placement, topology, rng = placed(seed, sizes, "cover")
        experts, _ = tokens(rng, placement, 9)
        experts[3, 0] = -1
        for source in {0, topology.ep_size - 1}:
            for copies in rank_copies(plan_of(placement, topology), source):
                for rows in (experts, experts[:0], experts[:, :1], experts[:, :3]):
                    ids = torch.from_numpy(rows).to((torch.int64, torch.int32)[seed % 2])
                    check_place(kernels, ids, copies.tables, source, topology.ep_size)


def test_numba_and_torch_agree():
    check_implementations(on_cpu)


def test_the_operator_may_be_compiled_and_traced():
    placement, topology, rng = placed(3, (4, 1), "cover")
    copies = rank_copies(plan_of(placement, topology), 1)[0]
    ids = torch.from_numpy(tokens(rng, placement, 5)[0])
    for totals in (torch.zeros(0, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)):
        torch.library.opcheck(place_experts, (ids, copies.tables, 1, totals, 4, 8, 4, None))


def test_triton_interpreted():
    interpret(__file__)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("experts", "ranks"), [(4, 8), (8, 64), (16, 512)])
def test_triton_compiles(target, experts, ranks):
    pytest.importorskip("triton", reason=NO_TRITON)
    import semmoe.runtime.kernels.copies as kernels

    kinds = {"expert_ids": "*i64", "ranks": "*i16", "physical": "*i32", "preferred": "*i16", "out": "*i64"}
    kinds |= {"totals": "*i64", "real": "*i64"}
    numbers = ("number", "top_k", "source", "num_ranks", "per_rank", "width")
    sizes = {"EXPERTS": experts, "RANKS": ranks, "NODES": 2, "BLOCK": max(kernels.TILE // experts // ranks, 1)}
    for copies, counts in ((4, True), (4, False), (1, True), (0, True)):
        flags = {"COPIES": copies, "COUNT": counts, "BOUND": copies == 1}
        compiles(target, kernels.place_kernel, kinds, numbers, {**flags, **sizes})


def test_a_rule_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="copy_choice must be static or cover, not 'any'"):
        Placement(physical_to_logical_map=np.array([[0, 1]]), num_experts=2, ep_size=2, copy_choice="any")


if __name__ == "__main__":
    from semmoe.runtime.kernels import copies

    check_implementations(copies)
