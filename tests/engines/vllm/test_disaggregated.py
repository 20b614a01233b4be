"""Prefill and decode apart: two servers of vLLM, each on a plan of its own, and the cache handed over in files.

vLLM's example connector names files by tokens and layer alone, so that ranks which share attention heads would write
the same ones: attention-DP, where each rank has all of them.
"""

import json

import pytest
from vllm_server import VllmServer

from semmoe.cli.demo import MODEL

pytestmark = pytest.mark.families
BLOCK = 32


@pytest.fixture(scope="module")
def servers(plans, tmp_path_factory):
    """The prefill side and the decode side."""
    folder = tmp_path_factory.mktemp("apart")
    made = []
    for role in ("kv_producer", "kv_consumer"):
        own = folder / role
        own.mkdir()
        how = {"kv_connector": "ExampleConnector", "kv_role": role,
               "kv_connector_extra_config": {"shared_storage_path": str(folder / "cache")}}  # fmt: skip
        # A prompt in one pass, since the connector keeps the first pass alone.
        engine = (
            "--kv-transfer-config",
            json.dumps(how),
            "--no-enable-prefix-caching",
            "--max-num-batched-tokens",
            "512",
        )
        made.append(VllmServer(own, str(MODEL), "--plan", plans["dp2"], engine=engine))
    try:
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.stop()


def test_decoding_goes_on_from_the_other_side(servers, prompts, reference):
    prefill, decode = servers
    prompts, reference = prompts[1:], reference[1:]  # the connector counts a prompt of one token as less than none
    for prompt in prompts:
        prefill.send(prompt, new_tokens=1)
    handed = sum((len(prompt) - 2) // BLOCK * BLOCK for prompt in prompts)  # whole blocks, and not the last token
    assert decode.complete(prompts) == reference
    assert decode.log.count("Inject KV cache") > 0
    layers = 6
    fed = sum(len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, reference, strict=True))
    seen = decode.counters()
    assert seen["routed_tokens"] <= layers * (fed - handed) + layers * 64
    for side in (prefill.counters(), seen):
        assert side["scheduled_requests plan"] == len(prompts)
        assert side.get("degraded", 0) == 0
