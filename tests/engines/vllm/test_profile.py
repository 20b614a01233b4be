"""`semmoe profile --engine vllm` records what transformers' own profile does, token for token."""

from server_tests import check_profiles


def test_both_engines_record_the_same(tmp_path):
    check_profiles("vllm", ["--dtype", "float32", "--max-model-len", "2048"], tmp_path)
