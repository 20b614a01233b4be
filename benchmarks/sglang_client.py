"""SGLang's own bench client for the benchmarks, and data sets of real text for it."""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from sglang_server import Server, ServerError

from semmoe.demo import MODEL
from semmoe.engines.transformers.model import load_tokenizer

# Our name of a figure -> the client's.
FIGURES = {
    "request_throughput": "request_throughput", "output_throughput": "output_throughput",
    "median_ttft_ms": "median_ttft_ms", "p99_ttft_ms": "p99_ttft_ms", "median_e2e_ms": "median_e2e_latency_ms",
    "p99_e2e_ms": "p99_e2e_latency_ms", "p99_itl_ms": "p99_itl_ms",
}  # fmt: skip
# The client imports `datasets` for sets that it would load from the Hub: none here.
CLIENT = """
import importlib.machinery, importlib.util, sys, types, transformers
if importlib.util.find_spec("datasets") is None:
    stub = types.ModuleType("datasets")
    stub.__spec__, stub.load_dataset = importlib.machinery.ModuleSpec("datasets", None), None
    sys.modules["datasets"] = stub
from sglang.benchmark.serving import cli_main
cli_main()
"""
Figures = dict[str, float]


class Client:
    """Runs where the server's node 0 runs."""

    def __init__(self, server: Server, output_tokens: int) -> None:
        self._server, self._output_tokens = server, output_tokens

    def run(self, dataset: Path, requests: int, rate: float, warmup: int = 1) -> Figures:
        """Figures of so many requests that arrive at `rate` a second, `inf`: all at once. Raises ServerError."""
        out = self._server.folder / "client.jsonl"
        out.unlink(missing_ok=True)
        words = [*self._server.prefix, sys.executable, "-c", CLIENT, "--backend", "sglang", "--host", "127.0.0.1"]
        words += ["--port", str(self._server.port), "--model", str(MODEL), "--dataset-name", "custom"]
        words += ["--dataset-path", str(dataset), "--num-prompts", str(requests), "--request-rate", str(rate)]
        words += ["--sharegpt-output-len", str(self._output_tokens), "--seed", "0", "--warmup-requests", str(warmup)]
        done = subprocess.run([*words, "--disable-tqdm", "--output-file", str(out)], capture_output=True, text=True)
        self._server.check()
        if done.returncode or not out.exists():
            raise ServerError(f"the client failed\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
        if found["completed"] != requests:
            raise ServerError(f"{found['completed']} of {requests} requests completed\n{self._server.log(0)}")
        return {ours: found[theirs] for ours, theirs in FIGURES.items()}


def write_datasets(held_out: list[list[int]], lengths: tuple[int, ...], wanted: int, folder: Path) -> dict[int, Path]:
    """Data sets of paragraphs as they are (0), and of `wanted` prompts of each length. Raises ValueError."""
    tokenizer, mixed = load_tokenizer(str(MODEL)), random.Random(0).sample(held_out, len(held_out))
    texts = {0: [tokenizer.decode(ids) for ids in mixed]}
    texts |= {length: exact(tokenizer, mixed, length, wanted) for length in lengths}
    return {length: _write(folder / f"prompts-{length}.jsonl", found) for length, found in texts.items()}


def exact(tokenizer: Any, prompts: list[list[int]], length: int, wanted: int) -> list[str]:
    """Texts, joined and cut, that the tokenizer turns into exactly `length` tokens; they may overlap."""
    ids = [token for prompt in prompts for token in prompt]
    step = max(1, (len(ids) - length) // (256 * wanted))  # few cuts keep their length
    cut = (tokenizer.decode(ids[i : i + length]) for i in range(0, len(ids) - length, step))
    found = list(islice((text for text in cut if len(tokenizer.encode(text)) == length), wanted))
    if len(found) < wanted:
        raise ValueError(f"the held-out text makes {len(found)} prompts of {length} tokens, not {wanted}")
    return found


def _write(path: Path, texts: list[str]) -> Path:
    # The client wants a second turn and ignores it.
    lines = [json.dumps({"conversations": [{"content": text}, {"content": "none"}]}) for text in texts]
    path.write_text("\n".join(lines) + "\n")
    return path
