"""Requests and experts clustered together."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.numeric.assignment import improve_assignment
from semmoe.placement.joint import _Problem, cocluster_requests, locality


def random_rates(seed, requests, layers, experts):
    rng = np.random.default_rng(seed)
    rates = rng.dirichlet(np.full(experts, 0.5), (requests, layers)) / layers
    return rates.astype(np.float32), rng.integers(1, 30, requests).astype(float)


def best_locality(rates, lengths, groups, token_limit):
    """The most pairs at home over every labelling of requests within the limit and every equal division of experts."""
    _, layers, experts = rates.shape
    divisions, best = oracles.equal_divisions(experts, groups), 0.0
    for labels in product(range(groups), repeat=len(rates)):
        load = np.bincount(labels, lengths, groups)
        if load.max() > token_limit * lengths.sum() / groups + 1e-9:
            continue
        total = 0.0
        for l in range(layers):
            pairs = np.zeros((experts, groups))
            for r, label in enumerate(labels):
                pairs[:, label] += rates[r, l] * lengths[r]
            total += max(sum(pairs[e, d] for e, d in enumerate(division)) for division in divisions)
        best = max(best, total / (rates * lengths[:, None, None]).sum())
    return best


def test_two_blocks_of_requests_find_their_experts_by_hand():
    """Requests 0 and 2 use experts 0 and 3 of layer 0 and 0 and 1 of layer 1; the others the rest."""
    rates = np.zeros((4, 2, 4), np.float32)
    rates[::2, 0, [0, 3]] = rates[1::2, 0, [1, 2]] = 0.25
    rates[::2, 1, :2] = rates[1::2, 1, 2:] = 0.25
    lengths = np.full(4, 10.0)
    experts, requests = cocluster_requests(rates, lengths, 2, starts=4)
    assert requests[0] == requests[2] != requests[1] == requests[3]
    a, b = requests[:2]
    assert experts.tolist() == [[a, b, b, a], [a, a, b, b]]
    assert locality(rates, lengths, experts, requests) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("requests", "layers", "experts", "groups"), [(6, 2, 4, 2), (7, 1, 6, 2), (5, 2, 3, 3)])
def test_small_instances_reach_the_optimum_of_enumeration(seed, requests, layers, experts, groups):
    rates, lengths = random_rates(seed, requests, layers, experts)
    found = cocluster_requests(rates, lengths, groups, starts=60, seed=seed, token_limit=1.6)
    best = best_locality(rates, lengths, groups, 1.6)
    assert locality(rates, lengths, *found) == pytest.approx(best, abs=1e-5)


@given(st.integers(0, 9999), st.integers(1, 20), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_slot_is_filled_and_a_seed_decides(seed, requests, layers, groups, per_group):
    rates, lengths = random_rates(seed, requests, layers, groups * per_group)
    experts, labels = cocluster_requests(rates, lengths, groups, starts=3, seed=seed)
    assert experts.shape == (layers, groups * per_group)
    for row in experts:
        assert np.bincount(row, minlength=groups).tolist() == [per_group] * groups
    assert labels.shape == (requests,)
    assert set(labels.tolist()) <= set(range(groups))
    again = cocluster_requests(rates, lengths, groups, starts=3, seed=seed)
    assert (experts == again[0]).all()
    assert (labels == again[1]).all()


@given(st.integers(0, 9999))
def test_more_starts_are_never_worse_and_names_of_experts_do_not_matter(seed):
    rates, lengths = random_rates(seed, 12, 2, 6)
    few = locality(rates, lengths, *cocluster_requests(rates, lengths, 3, starts=1, seed=seed, token_limit=2))
    many = locality(rates, lengths, *cocluster_requests(rates, lengths, 3, starts=30, seed=seed, token_limit=2))
    assert many >= few - 1e-6
    renamed = rates[:, :, np.random.default_rng(seed).permutation(6)]
    other = locality(renamed, lengths, *cocluster_requests(renamed, lengths, 3, starts=30, seed=seed, token_limit=2))
    assert other == pytest.approx(many, abs=1e-5)


def test_without_any_time_one_start_is_made():
    rates, lengths = random_rates(0, 12, 2, 6)
    for found, one in zip(
        cocluster_requests(rates, lengths, 3, in_time=lambda: False),
        cocluster_requests(rates, lengths, 3, starts=1),
        strict=True,
    ):
        np.testing.assert_array_equal(found, one)


def test_the_token_limit_holds_where_whole_requests_allow():
    rates, lengths = random_rates(0, 200, 2, 8)
    _, labels = cocluster_requests(rates, lengths, 4, starts=2, token_limit=1.05)
    load = np.bincount(labels, lengths, 4)
    assert load.max() <= 1.05 * load.mean() + 1e-6


def test_groups_that_do_not_divide_experts_have_at_most_one_more():
    rates, lengths = random_rates(0, 12, 2, 6)
    experts, _ = cocluster_requests(rates, lengths, 4)
    assert all(np.bincount(layer, minlength=4).max() <= 2 for layer in experts)


@given(st.integers(0, 9999), st.integers(1, 80), st.integers(1, 4))
def test_moves_and_swaps_never_lose_value_nor_leave_the_capacity(seed, requests, groups):
    rng = np.random.default_rng(seed)
    value, work = rng.random((requests, groups)), rng.integers(1, 9, (requests, groups)).astype(float)
    start = rng.integers(groups, size=requests)
    taken = np.bincount(start, work[np.arange(requests), start], groups)
    out = improve_assignment(value, work, taken, start.copy(), 20)
    rows = np.arange(requests)
    assert (np.bincount(out, work[rows, out], groups) <= taken + 1e-6).all()
    assert value[rows, out].sum() >= value[rows, start].sum() - 1e-9


@given(st.integers(0, 9999), st.integers(1, 20), st.integers(2, 4))
def test_no_single_move_or_swap_is_left_that_pays(seed, requests, groups):
    rng = np.random.default_rng(seed)
    value, work = rng.random((requests, groups)), rng.integers(1, 5, (requests, groups)).astype(float)
    start, rows = rng.integers(groups, size=requests), np.arange(requests)
    capacity = np.bincount(start, work[rows, start], groups) + 1
    out = improve_assignment(value, work, capacity, start.copy(), 200)
    for r, q in product(rows, rows):
        for b in range(groups):
            other = out.copy()
            other[q], other[r] = out[r], b  # a swap where q is in b, a move where q is r
            if (q == r or out[q] == b) and (np.bincount(other, work[rows, other], groups) <= capacity + 1e-6).all():
                assert value[rows, other].sum() <= value[rows, out].sum() + 1e-6


def test_of_many_partners_those_that_gain_most_are_tried():
    """Both groups are full. One request of each would gain or lose a little by a swap, the other 99 would lose 5."""
    groups = np.repeat([0, 1], 100)
    value = np.where(groups[:, None] == np.arange(2), 5.0, 0.0)
    value[50], value[150] = (0, 1), (0, 0.5)
    value += np.random.default_rng(0).integers(999, size=(200, 1))  # what is the same in both groups says nothing
    out = improve_assignment(value, np.ones((200, 2)), np.full(2, 100.0), groups.copy(), 5)
    assert np.flatnonzero(out != groups).tolist() == [50, 150]


def test_a_start_puts_each_request_with_the_seed_most_like_it():
    """Whatever the sizes: rates of a seed's kind count by their direction from the mean."""
    rates, lengths = random_rates(4, 30, 2, 6)
    rates[:10] *= 5
    groups = _Problem(rates, lengths, 3, 100.0).start(np.random.default_rng(1))
    apart = (rates - rates.mean(axis=0)).reshape(30, -1)
    centres = apart[np.random.default_rng(1).choice(30, 3, replace=False)]
    expected = (apart @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T).argmax(axis=1)
    np.testing.assert_array_equal(groups, expected)


def test_an_overfull_group_is_relieved_by_a_swap_though_it_costs_value():
    """Request 1 has three tokens where two fit, and changes places with request 2, which loses 6; request 0 stays."""
    value = np.array([[9.0, 0, 5], [-9, 0, 0], [-9, 0, 6]])
    work = np.array([[1.0] * 3, [3] * 3, [1] * 3])
    out = improve_assignment(value, work, np.array([1.0, 2, 3]), np.array([0, 1, 2]), 5)
    assert out.tolist() == [0, 2, 1]
