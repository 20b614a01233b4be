"""The functions of `on_cpu` as Triton kernels."""

from semmoe.runtime.kernels.argsort import order_of_real
from semmoe.runtime.kernels.assign import slices
from semmoe.runtime.kernels.copies import count, place
from semmoe.runtime.kernels.history import by_weight, observe_in_turn, restore
from semmoe.runtime.kernels.scores import look_up_tokens
from semmoe.runtime.kernels.shuffle import gather_both, gather_rows

__all__ = [
    "by_weight",
    "count",
    "gather_both",
    "gather_rows",
    "look_up_tokens",
    "observe_in_turn",
    "order_of_real",
    "place",
    "restore",
    "slices",
]
