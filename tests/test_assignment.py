"""Items in equal groups: the sum of values is that of SciPy's assignment of items to places."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from semmoe.numeric.assignment import equal_groups


def best_sum(value: np.ndarray) -> float:
    size = -(-len(value) // value.shape[1])
    places = np.repeat(value, size, axis=1)
    return float(places[linear_sum_assignment(places, maximize=True)].sum())


@pytest.mark.parametrize(("items", "groups"), [(1, 1), (1, 3), (5, 2), (32, 8), (33, 8), (64, 64), (200, 16)])
@pytest.mark.parametrize("kind", ["random", "ties", "negative", "one group", "nothing"])
def test_equal_groups_have_the_largest_sum(items, groups, kind):
    rng = np.random.default_rng(items * groups)
    value = {
        "random": rng.random((items, groups)),
        "ties": rng.integers(3, size=(items, groups)).astype(float),
        "negative": -1e7 * rng.random((items, groups)),
        "one group": rng.random((items, 1)) * np.eye(groups)[0],
        "nothing": np.zeros((items, groups)),
    }[kind]
    found = equal_groups(value)
    assert np.bincount(found, minlength=groups).max() <= -(-items // groups)
    assert value[np.arange(items), found].sum() == pytest.approx(best_sum(value), rel=1e-9, abs=1e-9)
