"""The guard sees a change, and no other difference than a change."""

import copy

import numpy as np
from guard import arrays, differences, figures
from safetensors.numpy import save_file

TABLES = {"places": np.arange(6, dtype=np.int32), "scores": np.linspace(0, 1, 6, dtype=np.float32)}


def test_names_of_arrays_do_not_matter_and_values_do(tmp_path):
    def recorded(**changes):
        save_file(TABLES | changes, tmp_path / "x.safetensors")
        return arrays([tmp_path / "x.safetensors"])

    before = recorded()
    save_file({"renamed": TABLES["scores"], "other": TABLES["places"]}, tmp_path / "x.safetensors")
    assert differences(before, arrays([tmp_path / "x.safetensors"])) == []
    assert len(differences(before, recorded(places=TABLES["places"][::-1].copy()))) == 1
    assert len(differences(before, recorded(places=TABLES["places"].astype(np.int64)))) == 1
    assert differences(before, recorded(scores=TABLES["scores"] * np.float32(1 + 1e-7))) == []
    assert differences(before, recorded(scores=TABLES["scores"] * np.float32(1.01))) != []


def test_figures_are_compared_as_they_are_printed_and_times_not_at_all():
    before = figures({"a": {"lar": 0.4271234, "solve_seconds": 3.0, "layers": [1, 2]}})
    after = copy.deepcopy(before)
    assert differences(before, figures({"a": {"lar": 0.4271234 + 1e-9, "solve_seconds": 9.0, "layers": [1, 2]}})) == []
    after["a"]["layers"][1] = 3
    assert differences(before, after) == ["/a/layers/1: 2 became 3"]
    assert differences(before, {}) != []
