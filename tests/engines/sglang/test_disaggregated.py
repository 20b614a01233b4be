"""Prefill and decode apart: two servers of SGLang, each on a plan of its own, the cache handed over by Mooncake on TCP.

In attention-DP each side gives a request the rank that its plan says; the decode side asks the prefill side's bootstrap
server which of the ranks there has the request.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import free_port
from sglang_server import SglangServer

from semmoe.cli.demo import MODEL

pytest.importorskip("mooncake.engine", reason="Mooncake needs libibverbs", exc_type=ImportError)
pytestmark = pytest.mark.families
ROOMS = itertools.count(1)


@pytest.fixture(scope="module")
def bootstrap():
    return free_port()


@pytest.fixture(scope="module", params=["dp2", "tp2"])
def servers(request, plans, swap_plans, bootstrap, tmp_path_factory):
    """The prefill side and the decode side."""
    name, folder, made = request.param, tmp_path_factory.mktemp("apart"), []
    for role, plan in (("prefill", plans[name]), ("decode", swap_plans[name][0])):
        own = folder / role
        own.mkdir()
        engine = ("--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake",
                  "--disaggregation-bootstrap-port", str(bootstrap))  # fmt: skip
        engine += ("--no-enable-tp-lm-head-all-to-all",) if role == "decode" else ()  # SGLang's has no CPU kernel
        variables = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp",
                     "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}  # that takes an event of CUDA  # fmt: skip
        options = "--plan", plan
        made.append(SglangServer(own, str(MODEL), *options, engine=engine, variables=variables))
    try:
        yield name, [server.wait() for server in made]
    finally:
        for server in made:
            server.stop()


def ask(servers, bootstrap, prompt):
    """Both sides' answers to a request that both are sent, as by SGLang's router."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": next(ROOMS)}
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda one: one.send(prompt, **room), servers))


def test_decoding_goes_on_from_the_other_side(servers, bootstrap, prompts, reference):
    name, (prefill, decode) = servers
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: ask((prefill, decode), bootstrap, prompt), prompts))
    assert [decode.tokens(answer) for _, answer in answers] == reference
    layers, decoded = 6, sum(len(answer) - 1 for answer in reference)
    fed = sum(len(prompt) - prefill.cached(answer) for prompt, (answer, _) in zip(prompts, answers, strict=True))
    before, after = prefill.counters(), decode.counters()
    assert before["routed_tokens"] >= layers * fed
    assert layers * decoded <= after["routed_tokens"] < layers * (decoded + 100)  # and no prompt again
    for side in (before, after):
        assert side.get("scheduled_requests plan", 0) == (len(prompts) if name == "dp2" else 0)
        assert side.get("degraded", 0) == 0
