"""`semmoe profile --engine sglang` records what transformers' own profile does, token for token."""

import sys
from unittest import mock

import numpy as np
import pytest

from semmoe.cli import main
from semmoe.demo import MODEL
from semmoe.trace import open_trace


def test_both_engines_record_the_same(tmp_path):
    for engine in ("transformers", "sglang"):
        words = ["profile", str(MODEL), "--limit", "24", "--max-prompt-tokens", "120", "--decode", "6", "--out",
                 str(tmp_path / engine), "--engine", engine, *(SGLANG if engine == "sglang" else [])]  # fmt: skip
        with mock.patch.object(sys, "argv", ["semmoe", *words]), pytest.raises(SystemExit) as done:
            main()
        assert done.value.code in (0, None)
    ours, theirs = open_trace(tmp_path / "transformers"), open_trace(tmp_path / "sglang")
    for name in ("token_ids", "request_offsets", "phase", "prompt_ids"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_array_equal(ours.expert_ids, theirs.expert_ids)


SGLANG = ["--", "--dtype", "float32", "--max-total-tokens", "8192", "--mem-fraction-static", "0.1"]
