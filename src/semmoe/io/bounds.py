"""Bounds on values: numbers in settings, arrays in policies, and sizes that a file declares."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

# Largest sizes that a file may declare. They exceed every known model and cluster, and the arrays that are allocated
# from them still fit in memory.
MOST_RANKS = 4096
MOST_VOCABULARY = 1 << 22
MOST_LAYERS = 1024
MOST_EXPERTS = 4096  # per layer
MOST_TABLE = 1 << 28  # entries of an array of shape (L, E), (L, V) or (L, G, E)


def number(default: Any, low: float, high: float, **shown: Any) -> Any:
    """A dataclass field whose value lies between `low` and `high`, both included; None is allowed if it is the default.

    default: `...` for none. `Checked` enforces the bounds. shown: arguments of `option`, for the command line.
    """
    metadata = {"low": low, "high": high, **option(**shown)}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def choice(default: str | None, names: tuple[str, ...], **shown: Any) -> Any:
    """A dataclass field whose value is one of `names`; None is allowed if it is the default."""
    return field(default=default, metadata={"choices": names, **option(**shown)})


def option(help: str = "", panel: str = "Method", zero_is_none: bool = False) -> dict:
    """Metadata that makes a field an option of the command line; a field without help text is not an option.

    zero_is_none: the option's value 0 means None, that is, unlimited.
    """
    return {"help": help, "panel": panel, "zero_is_none": zero_is_none} if help else {}


class Checked:
    """Base of dataclasses whose numbers (`number`) and choices (`choice`) are checked when they are made."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is None and (one.default is None or one.metadata.get("zero_is_none")):
                continue
            if "choices" in one.metadata and value not in one.metadata["choices"]:
                raise ValueError(f"{one.name} must be {' or '.join(one.metadata['choices'])}, not {value!r}")
            if "low" not in one.metadata:
                continue
            low, high = one.metadata["low"], one.metadata["high"]
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not low <= value <= high:
                raise ValueError(f"{one.name} must lie between {low:,} and {high:,}, not {value}")


def check_table(what: str, *sizes: int) -> None:
    """Raise ValueError if an array of shape `sizes` has more entries than any known model needs."""
    entries = math.prod(sizes)
    if entries > MOST_TABLE:
        raise ValueError(f"{what} is {entries:,}, more than the {MOST_TABLE:,} that any known model needs")


def check_offsets(name: str, offsets: np.ndarray, end: int) -> None:
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must rise from 0 to {end}")


def check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")


def whole_numbers(name: str, array: np.ndarray) -> np.ndarray:
    """The array itself. Raises ValueError unless its type is an integer's."""
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} are {array.dtype}, expected integers")
    return array


def check_range(name: str, ids: np.ndarray, size: int, what: str) -> None:
    whole_numbers(f"{name}s", ids)
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"{name} {low if low < 0 else high} is out of range for {size} {what}")


@dataclass(frozen=True)
class Declared:
    """Shape, type and range that an array of a policy must have."""

    shape: tuple[int, ...]
    dtype: Any
    low: float
    high: float

    def check(self, name: str, array: np.ndarray) -> None:
        """Raise ValueError unless `array` has this shape, type and range."""
        check_shape(name, array, self.shape)
        if array.dtype != self.dtype:
            raise ValueError(f"{name} has type {array.dtype}, expected {np.dtype(self.dtype)}")
        if array.size and not (array.min() >= self.low and array.max() <= self.high):  # also for NaN
            raise ValueError(f"{name} holds a value outside {self.low} to {self.high}")


def array_names(kind: Any) -> list[str]:
    """Names of the fields of a policy's class that are arrays."""
    return [one.name for one in fields(kind) if one.type is np.ndarray]


def number_types(kind: Any) -> dict[str, Any]:
    """Types (int or float) of the fields of a policy's class that are not arrays, by name."""
    return {one.name: one.type for one in fields(kind) if one.type is not np.ndarray}
