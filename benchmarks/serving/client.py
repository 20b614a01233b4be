"""The engines' own bench clients, and data sets of real text for them."""

import json
import random
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

from semmoe.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer
from serving.engine import Engine
from serving.server import Server, ServerError

Figures = dict[str, float]


class Client:
    """Runs where the server's node 0 runs."""

    def __init__(self, engine: Engine, server: Server, output_tokens: int) -> None:
        self._engine, self._server, self._output_tokens = engine, server, output_tokens

    def run(self, dataset: Path, requests: int, rate: float, warmup: int = 1) -> Figures:
        """Figures of so many requests that arrive at `rate` a second, `inf`: all at once. Raises ServerError."""
        out = self._server.folder / "client.json"
        out.unlink(missing_ok=True)
        words = self._engine.bench(self._server.port, dataset, requests, rate, warmup, self._output_tokens, out)
        done = subprocess.run([*self._server.prefix, *words], capture_output=True, text=True)
        self._server.check()
        if done.returncode or not out.exists():
            raise ServerError(f"the client failed\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
        if found["completed"] != requests:
            raise ServerError(f"{found['completed']} of {requests} requests completed\n{self._server.log(0)}")
        return {ours: found[theirs] for ours, theirs in self._engine.FIGURES.items()}


def write_datasets(
    engine: Engine, held_out: list[list[int]], lengths: tuple[int, ...], wanted: int, folder: Path
) -> dict[int, Path]:
    """Data sets of paragraphs as they are (0), and of `wanted` prompts of each length. Raises ValueError."""
    tokenizer, mixed = load_tokenizer(str(MODEL)), random.Random(0).sample(held_out, len(held_out))
    texts = {0: [tokenizer.decode(ids) for ids in mixed]}
    texts |= {length: exact(tokenizer, mixed, length, wanted) for length in lengths}
    paths = {length: folder / f"prompts-{length}.json" for length in texts}
    for length, found in texts.items():
        paths[length].write_text(engine.dataset(found))
    return paths


def exact(tokenizer: Any, prompts: list[list[int]], length: int, wanted: int) -> list[str]:
    """Texts, joined and cut, that the tokenizer turns into exactly `length` tokens; they may overlap."""
    ids = [token for prompt in prompts for token in prompt]
    step = max(1, (len(ids) - length) // (256 * wanted))  # few cuts keep their length
    cut = (tokenizer.decode(ids[i : i + length]) for i in range(0, len(ids) - length, step))
    found = list(islice((text for text in cut if len(tokenizer.encode(text)) == length), wanted))
    if len(found) < wanted:
        raise ValueError(f"the held-out text makes {len(found)} prompts of {length} tokens, not {wanted}")
    return found
