"""Whether greedy answers repeat in the engine's default type, whatever number of requests runs at the same time."""

from concurrent.futures import ThreadPoolExecutor

from semmoe.cli.demo import MODEL
from semmoe.plan import load_plan

CONCURRENCY = (1, 16, 4)
NEW_TOKENS = 16


def check_repeats(kind, plan, prompts, folder, *options):
    """Serve a plan without copies with a server of class `kind`: no answer differs from the first one to its prompt.

    options: the engine's own.
    """
    assert load_plan(plan).placement.redundant_experts == 0
    server = kind(folder, str(MODEL), "--plan", plan, engine=("--dtype", "auto", *options))
    try:
        assert "bfloat16" in server.wait().log
        first, *others = [_ask(server, prompts, clients) for clients in CONCURRENCY]
        differ = [(i, a, b) for other in others for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        assert differ == []
        assert server.counters()["scheduled_requests plan"] >= len(CONCURRENCY) * len(prompts)
    finally:
        server.stop()


def _ask(server, prompts, clients):
    with ThreadPoolExecutor(clients) as pool:
        return [server.tokens(answer) for answer in pool.map(lambda prompt: server.send(prompt, NEW_TOKENS), prompts)]
