"""Profile through vLLM: record which experts each token chose in the passes of its offline engine."""

from collections.abc import Callable, Sequence

import numpy as np

from semmoe.engines.launch import command_line
from semmoe.engines.settings import PluginSettings
from semmoe.engines.vllm import launch
from semmoe.engines.vllm.offline import running
from semmoe.live.recorder.memory import Rows
from semmoe.topology import Topology
from semmoe.traces.trace import TraceWriter


class Passes:
    """Keeps the routing of passes by request."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Rows]] = {}

    def poll(self) -> bool:
        return True

    def observe(self, requests: Sequence[str], rows: Rows) -> None:
        for r, request in enumerate(requests):
            self._seen.setdefault(request, []).append(rows.where(rows.slots == r))

    def finish(self, request: str, prompt_ids: Sequence[int], length: int) -> None:
        """Do nothing: the caller takes a request's routing by `take`."""

    def take(self, request: str, length: int) -> dict[str, np.ndarray]:
        """The arrays of a request's first `length` tokens, each once, by the names of `TraceWriter.append_run`."""
        key = next(key for key in self._seen if key == request or key.startswith(f"{request}-"))
        seen = self._seen.pop(key)
        found, first = np.unique(np.concatenate([rows.positions for rows in seen]), return_index=True)
        assert np.array_equal(found[:length], np.arange(length)), "every token runs"
        whole = {name: np.concatenate([getattr(rows, name) for rows in seen]) for name in ("token_ids", "expert_ids")}
        return {name: array[first[:length]] for name, array in whole.items()}


def profile(
    model: str,
    prompts: Sequence[Sequence[int]],
    writer: TraceWriter,
    *,
    top_k: int,
    max_new_tokens: int = 0,
    batch_size: int = 64,
    options: Sequence[str] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Run the prompts that `writer` does not hold yet and append each one's routing: prefill, then greedy decode.

    options: vLLM's own. The last generated token is never fed back and so has no routing. top_k is the model's.
    """
    words = command_line(launch.arguments(Topology(ep_size=1), eager=True)) + ["--no-enable-prefix-caching", *options]
    remaining, passes = prompts[writer.num_requests :], Passes()
    with running(model, words, launch.environment(PluginSettings(), launch.on_cpu()), passes) as engine:
        for start in range(0, len(remaining), batch_size):
            batch = remaining[start : start + batch_size]
            for prompt, (request, new) in zip(batch, engine.complete(batch, max(max_new_tokens, 1)), strict=True):
                writer.append_run(prompt, **passes.take(request, len(prompt) + len(new) - 1))
            progress(len(batch))
