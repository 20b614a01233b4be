"""Items to groups of equal size, exactly."""

import numpy as np
from scipy.optimize import linear_sum_assignment


def equal_groups(value: np.ndarray) -> np.ndarray:
    """(N,) the group of each item, at most ceil(N / G) in one, with the largest sum of value (N, G)."""
    size = -(-len(value) // value.shape[1])
    return linear_sum_assignment(np.repeat(value, size, axis=1), maximize=True)[1] // size
