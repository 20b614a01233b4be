"""vLLM's offline engine in this process: complete prompts, and observe the routing of its passes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from semmoe.engines.hooks import cpu_patches
from semmoe.engines.vllm import launch
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.live.recorder.passes import Listener


class Offline:
    """A running engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def complete(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[tuple[str, list[int]]]:
        """Greedy completions of all prompts: request id and new tokens of each."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._engine.generate(given, sampling, use_tqdm=False)
        return [(answer.request_id, list(answer.outputs[0].token_ids)) for answer in answers]


@contextmanager
def running(
    model: str,
    options: Sequence[str],
    environment: dict[str, str],
    listener: Listener | None = None,
) -> Iterator[Offline]:
    """Run vLLM's engine on one rank with its own command-line options; on exit the environment is restored.

    listener: receives the rows of every pass.
    """
    before = dict(os.environ)
    os.environ.update(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    engine = None
    try:
        if launch.on_cpu():
            cpu_patches("vllm").patch_start()
        engine = _engine(["--model", model, *options])
        if listener is not None:
            _listen(engine, listener)
        yield Offline(engine)
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _engine(words: Sequence[str]) -> Any:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vLLM's options"))
    given = EngineArgs.from_cli_args(parser.parse_args(list(words)))
    ranks = given.tensor_parallel_size * given.data_parallel_size * given.pipeline_parallel_size
    if ranks != 1:
        raise ValueError(f"profiling runs on one rank, not on {ranks}")
    given.disable_log_stats = True
    return LLM.from_engine_args(given)


def _listen(engine: Any, listener: Listener) -> None:
    from semmoe.engines.vllm.rank import RankPlugin

    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    RankPlugin(VllmSettings()).listen(runner, listener)
