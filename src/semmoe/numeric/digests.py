"""A digest of any value made of dataclasses, mappings, sequences, arrays and plain values, such as a plan."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def digest(value: object) -> np.ndarray:
    """(32,) uint8: SHA-256 of a value and everything it contains."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return np.frombuffer(sha.digest(), np.uint8)


def _feed(sha: Any, value: Any) -> None:
    """Add a value made of dataclasses, mappings, sequences, arrays and plain values, each with its type and length."""
    if isinstance(value, np.ndarray):
        sha.update(f"array {value.dtype} {value.shape}".encode())
        sha.update(np.ascontiguousarray(value))
    elif is_dataclass(value):
        sha.update(f"dataclass {type(value).__name__}".encode())
        _feed(sha, {field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, Mapping):
        for name in sorted(value):
            sha.update(f"key {name!r}".encode())
            _feed(sha, value[name])
    elif isinstance(value, (list, tuple)):
        sha.update(f"sequence of {len(value)}".encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(f"{type(value).__name__} {value!r}".encode())
