"""The functions of `on_cpu` as Triton kernels."""

from semmoe.runtime.kernels.argsort import order_of_real
from semmoe.runtime.kernels.assign import assign
from semmoe.runtime.kernels.copies import count, place
from semmoe.runtime.kernels.history import by_weight, contribution, observe, observe_in_turn
from semmoe.runtime.kernels.scores import look_up_tokens, score
from semmoe.runtime.kernels.shuffle import gather_rows

__all__ = [
    "assign",
    "by_weight",
    "contribution",
    "count",
    "gather_rows",
    "look_up_tokens",
    "observe",
    "observe_in_turn",
    "order_of_real",
    "place",
    "score",
]
