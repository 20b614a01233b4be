"""Whether greedy answers repeat in the engine's default type while the number of requests at a time changes.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_repeats.py --engine sglang|vllm [--rounds 21]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1). The shipped model, two ranks: vanilla, a plan
without copies and one with eight, in attention-DP; vanilla and a plan in attention-TP. Sixteen prompts are asked again
and again, 1 to 16 at a time, and each answer is compared with the first one to its prompt. With copies the rank that
serves a request decides which experts are summed before rows are combined, and partial sums are rounded. Prints a row
for each server, and one JSON line.
"""

import argparse
import itertools
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from serving.engine import Engine, SetUp, add_engine, engine
from serving.server import Server, make_plan, prompts, serving

CLIENTS = (1, 16, 4, 2, 8)
NUM_PROMPTS, NEW_TOKENS = 16, 32
SET_UPS = (  # name, attention, redundant experts; None: no plan
    ("attention-DP, vanilla", "dp", None),
    ("attention-DP, plan", "dp", 0),
    ("attention-DP, plan with 8 copies", "dp", 8),
    ("attention-TP, vanilla", "tp", None),
    ("attention-TP, plan", "tp", 0),
)


def ask(server: Server, model: str, asked: list[list[int]], clients: int) -> list[str]:
    """The text of each greedy answer, with so many clients at a time."""

    def one(prompt: list[int]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, asked))


def measure(chosen: Engine, up: SetUp, asked: list[list[int]], rounds: int, folder: Path) -> tuple[int, int]:
    """The number of answers that differ from the first one to their prompt, and of those compared."""
    with serving(chosen, up, folder, {"dtype": "auto"}) as server:
        model = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
        first = ask(server, model, asked, 1)
        different = 0
        for clients in itertools.islice(itertools.cycle(CLIENTS), rounds):
            different += sum(a != b for a, b in zip(ask(server, model, asked, clients), first, strict=True))
    return different, rounds * len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    chosen, rows = engine(args.engine), {}
    seen, served = prompts()
    print(f"{chosen}, the shipped model in its own type, {NUM_PROMPTS} prompts, {NEW_TOKENS} new tokens")
    with tempfile.TemporaryDirectory() as scratch:
        for place, (name, attention, redundant) in enumerate(SET_UPS):
            folder = Path(scratch) / str(place)
            folder.mkdir()
            plan = None if redundant is None else make_plan(seen, attention, redundant, folder)
            found = measure(chosen, SetUp(name, attention, plan), served[:NUM_PROMPTS], args.rounds, folder)
            rows[name] = found
            print(f"{name:34} {found[0]:4} of {found[1]} answers differ", flush=True)
    print(json.dumps({"engine": str(chosen), "rounds": args.rounds, "different_of": rows}))


if __name__ == "__main__":
    main()
