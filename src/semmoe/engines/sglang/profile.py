"""Profile through SGLang: record which experts each token chose, as returned by its offline engine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from semmoe.checkpoint.layout import decoder_layers
from semmoe.engines.launch import command_line
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.offline import running
from semmoe.topology import Topology
from semmoe.traces.trace import TraceWriter


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

    options: SGLang's own. The last generated token is never fed back and so has no routing.
    """
    layers, _ = decoder_layers(Path(model))
    here, on_cpu = Topology(ep_size=1), launch.on_cpu()
    words = command_line(launch.arguments(here, None, 0, on_cpu)) + list(options)
    remaining = prompts[writer.num_requests :]
    with running(model, words, launch.environment(PluginSettings(), here, on_cpu), top_k) as engine:
        for first in range(0, len(remaining), batch_size):
            batch = remaining[first : first + batch_size]
            for prompt, completion in zip(batch, engine.complete(batch, max(max_new_tokens, 1)), strict=True):
                assert completion.expert_ids is not None
                fed = np.array([*prompt, *completion.token_ids[:-1]])
                writer.append_run(prompt, fed, completion.expert_ids[:, layers])
            progress(len(batch))
