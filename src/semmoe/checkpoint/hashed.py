"""The tables of hash-routed layers in a checkpoint: read for a trace, and renumbered for a relabelled checkpoint."""

from pathlib import Path

import numpy as np

from semmoe.bounds import check_range
from semmoe.checkpoint.directory import config_count, open_checkpoint, tensor_names
from semmoe.checkpoint.layout import TABLE, find_moe_layers
from semmoe.checkpoint.shards import Tensor
from semmoe.hashed import NO_HASHED, HashedLayers
from semmoe.topology import Fingerprint


def read_hashed(model: Path | str, f: Fingerprint) -> HashedLayers:
    """The tables of a model directory's hash-routed layers.

    Raises ValueError for tables that do not fit the fingerprint, and for experts in an unknown layout.
    """
    path = Path(model)
    if not any(TABLE.search(name) for name in tensor_names(path)):
        return NO_HASHED
    source = open_checkpoint(path)
    layers = find_moe_layers(source.tensors, config_count(source.config, "num_hidden_layers"), f.num_experts)
    named = {i: name for i, layer in enumerate(layers) for name in layer.tables}
    if not named:  # of layers for multi-token prediction alone
        return NO_HASHED
    tables = [source.tensors[name].integers() for name in named.values()]
    for name, table in zip(named.values(), tables, strict=True):
        check_range(f"{name}: expert id", table, f.num_experts, "experts")
    dtype = np.uint8 if f.num_experts <= 256 else np.int16
    found = HashedLayers(layers=np.array(list(named), np.int32), expert_ids=np.stack(tables).astype(dtype))
    found.check(f)
    return found


def relabelled_table(name: str, table: Tensor, order: np.ndarray) -> bytes:
    """The table (V, K) with new expert numbers; order (E,): the old expert at each of them."""
    values = table.integers()
    check_range(f"{name}: expert id", values, len(order), "experts")
    return np.argsort(order).astype(values.dtype)[values].tobytes()
