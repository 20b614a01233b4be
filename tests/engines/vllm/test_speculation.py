"""Drafts that an engine proposes to itself: rejected ones are no tokens of a request, whatever is recorded."""

import pytest
from server_tests import ServerTests, check, check_profiles, started
from vllm_server import VllmServer

pytestmark = pytest.mark.timeout(600)  # for machines under load
SPECULATING = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}',
)
server = started(VllmServer, {"tp2, speculating": (["--plan", "tp2"], SPECULATING)})


class Recorded(ServerTests):
    __test__ = False
    RECORDING = ("tp2, speculating",)


def test_a_profile_is_that_of_the_plain_model(tmp_path):
    check_profiles("vllm", ["--dtype", "float32", "--max-model-len", "2048", *SPECULATING], tmp_path)


@pytest.mark.costly
def test_a_server_shuffles_and_records_tokens_that_stand(server, model, prompts, reference, texts, tmp_path, capsys):
    check(model, prompts, reference, server.complete(prompts))
    Recorded().test_recorded_routing_is_the_plain_models(server, model, texts, tmp_path, capsys)
    assert (
        server.metric("vllm:spec_decode_num_draft_tokens") > server.metric("vllm:spec_decode_num_accepted_tokens") > 0
    )
