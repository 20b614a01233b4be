"""Whether greedy answers repeat in the engine's default type, whatever number of requests runs at the same time."""

from concurrent.futures import ThreadPoolExecutor

CONCURRENCY = (1, 16, 4, 2, 16, 1, 8)
NEW_TOKENS = 16


def different_answers(server, prompts):
    """The answers to `prompts` that differ from the first one to the same prompt, in rounds of changing concurrency."""
    rounds = [_ask(server, prompts, clients) for clients in CONCURRENCY]
    return [(clients, i) for clients, answers in zip(CONCURRENCY, rounds, strict=True)
            for i, (answer, first) in enumerate(zip(answers, rounds[0], strict=True)) if answer != first]  # fmt: skip


def _ask(server, prompts, clients):
    with ThreadPoolExecutor(clients) as pool:
        return [server.tokens(answer) for answer in pool.map(lambda prompt: server.send(prompt, NEW_TOKENS), prompts)]
