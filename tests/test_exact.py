"""The 0-1 program finds what enumeration finds."""

import numpy as np
import oracles
import pytest
from exact import solve_exactly


def test_two_blocks_are_told_apart_by_hand():
    """Items 0 and 2 use experts 0 and 3, the others 1 and 2; one stray token of 16 is all that stays remote."""
    activations = np.array([[2, 0, 0, 2], [0, 3, 1, 0], [2, 1, 0, 1], [0, 1, 3, 0]], float)
    experts, items, objective = solve_exactly(activations, 2, theta=0.5)
    assert experts[0] == experts[3] != experts[1] == experts[2]
    assert items[0] == items[2] == experts[0]
    assert items[1] == items[3] == experts[1]
    assert objective == pytest.approx(0.5 * 1 / 16)


@pytest.mark.parametrize("theta", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("items", "experts", "clusters"), [(5, 4, 2), (4, 3, 3), (3, 6, 3)])
def test_the_optimum_agrees_with_enumeration(seed, theta, items, experts, clusters):
    activations = np.random.default_rng(seed).integers(0, 9, (items, experts)).astype(float)
    expert_labels, item_labels, objective = solve_exactly(activations, clusters, theta)
    assert objective == pytest.approx(oracles.best_objective(activations, clusters, theta), abs=1e-6)
    assert oracles.objective(activations, item_labels, expert_labels, theta) == pytest.approx(objective, abs=1e-6)
    assert np.bincount(expert_labels).tolist() == [experts // clusters] * clusters


def test_clusters_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="2 clusters do not divide 3 experts"):
        solve_exactly(np.ones((2, 3)), 2, 0.5)


def test_an_optimum_that_is_not_proven_in_time_is_an_error():
    activations = np.random.default_rng(0).integers(0, 9, (20, 12)).astype(float)
    with pytest.raises(ValueError, match="no proven optimum within"):
        solve_exactly(activations, 4, 0.5, time_limit=0.01)
