"""The 0-1 program of section 3.3, linearised and solved exactly by HiGHS: for small instances, to hold others against.

With N items, E experts and C clusters it has C (N + E + N E) + C variables; tens of items and experts take seconds,
a real layer does not end.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix


def solve_exactly(
    activations: np.ndarray, num_clusters: int, theta: float, time_limit: float = 60.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Minimise theta * (token imbalance) + (1 - theta) * (remote activations), each expert cluster equally large.

    activations: (N, E) tokens of item n that activate expert e, the item's tokens spread over experts.
    Returns expert labels (E,), item labels (N,) and the objective per token, as `paper.objective` gives it.
    Raises ValueError if the optimum is not proven within `time_limit` seconds.
    """
    N, E = activations.shape
    C, total, size = num_clusters, activations.sum(), activations.sum(axis=1)
    if E % C != 0:
        raise ValueError(f"{C} clusters do not divide {E} experts")
    # Variables: r[n, c], x[e, c], z[n, e, c] <= both (item n and expert e in c), u[c] >= |load - share|.
    r, x = np.arange(N * C).reshape(N, C), N * C + np.arange(E * C).reshape(E, C)
    z = x.max() + 1 + np.arange(N * E * C).reshape(N, E, C)
    u = z.max() + 1 + np.arange(C)
    cost = np.zeros(u.max() + 1)
    cost[z.ravel()] = -(1 - theta) * np.repeat(activations.ravel(), C)
    cost[u] = theta
    rows = _Rows(len(cost))
    for n in range(N):
        rows.add(r[n], 1.0, 1, 1)
    for e in range(E):
        rows.add(x[e], 1.0, 1, 1)
    for c in range(C):
        rows.add(x[:, c], 1.0, E // C, E // C)
        for sign in (1.0, -1.0):
            rows.add(np.append(r[:, c], u[c]), np.append(sign * size, -1.0), -np.inf, sign * total / C)
        for n in range(N):
            rows.add(np.append(z[n, :, c], r[n, c]), np.append(np.ones(E), -float(E)), -np.inf, 0)
            for e in range(E):
                rows.add(np.array([z[n, e, c], x[e, c]]), np.array([1.0, -1.0]), -np.inf, 0)
    upper = np.ones(len(cost))
    upper[u] = np.inf
    integrality = np.zeros(len(cost))
    integrality[np.concatenate([r.ravel(), x.ravel()])] = 1
    result = milp(
        cost, constraints=rows.constraint(), bounds=Bounds(0, upper), integrality=integrality,
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )  # fmt: skip
    if result.status != 0:
        raise ValueError(f"no proven optimum within {time_limit} s: {result.message}")
    remote_if_none_local = (1 - theta) * total
    objective = float((result.fun + remote_if_none_local) / total)
    return result.x[x].argmax(axis=1), result.x[r].argmax(axis=1), objective


class _Rows:
    """Linear constraints, gathered row by row into one sparse matrix."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._bounds: list[tuple[float, float]] = []

    def add(self, columns: np.ndarray, values: np.ndarray | float, low: float, high: float) -> None:
        self._columns.append(columns)
        self._values.append(np.broadcast_to(values, columns.shape))
        self._bounds.append((low, high))

    def constraint(self) -> LinearConstraint:
        row = np.repeat(np.arange(len(self._columns)), [len(c) for c in self._columns])
        entries = (np.concatenate(self._values), (row, np.concatenate(self._columns)))
        low, high = np.array(self._bounds).T
        return LinearConstraint(coo_matrix(entries, shape=(len(self._columns), self._width)).tocsr(), low, high)
