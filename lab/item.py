"""What an item of the paper is here, and what comes of making it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lab.inputs import Inputs

Cell = str | int | float | None
VANILLA, PLAN, OTHER = "#8a8f98", "#0072B2", "#d55e00"  # colours: what engines do, semmoe, the paper's method
BASELINE = "#56b4e9"  # other methods
MODEL_DIFFERS = "another model and other text"


class LackingError(ValueError):
    """What an item is made from is not there; says what it is and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure of the paper beside what was measured here."""

    what: str
    published: str
    measured: str
    why: str  # they differ


@dataclass(frozen=True, kw_only=True)
class Result:
    """Data, picture and what they are of. `stated`: workload, split and whatever else decides them."""

    columns: list[str]
    rows: list[list[Cell]]
    picture: Figure
    stated: dict[str, Any]
    comparisons: list[Comparison] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Item:
    """make raises LackingError where its inputs are not there."""

    name: str
    title: str
    needs: str
    seconds: float  # on two cores, from the shipped model alone
    make: Callable[[Inputs], Result]


def panel(width: float = 5.2, height: float = 3.4, columns: int = 1, rows: int = 1) -> tuple[Figure, np.ndarray]:
    """A figure without a window, and its axes (rows, columns)."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def legend(figure: Figure) -> None:
    """One legend of all panels' curves below them, where it hides none."""
    named = [axis.get_legend_handles_labels() for axis in figure.axes]
    by_label = {label: handle for handles, labels in named for handle, label in zip(handles, labels, strict=True)}
    look = {"ncols": min(len(by_label), 4), "fontsize": 8, "frameon": False}
    figure.legend(list(by_label.values()), list(by_label), loc="outside lower center", **look)


def span(values: list[float], digits: int = 3) -> str:
    """The least and the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def colour(set_up: str) -> str:
    """Of what stands for a set-up, named by its method first."""
    return {"vanilla": VANILLA, "semmoe": PLAN, "paper": OTHER}.get(set_up.split(",")[0], BASELINE)
