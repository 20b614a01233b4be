"""`semmoe profile --engine sglang` records what transformers' own profile does, token for token."""

from server_tests import check_profiles


def test_both_engines_record_the_same(tmp_path):
    own = ["--dtype", "float32", "--max-total-tokens", "8192", "--mem-fraction-static", "0.1"]
    check_profiles("sglang", own, tmp_path)
