"""Profile a model from Python: the public `semmoe.profile`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from semmoe.core import RoutingTrace
from semmoe.settings import ProfileSettings


def profile(
    model: str,
    prompts: Sequence[str],
    out: Path | str,
    settings: ProfileSettings | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> RoutingTrace:
    """Run `prompts` through a model on transformers and record which experts each token chooses, in the folder `out`.

    model: the folder of a checkpoint. A run that was stopped resumes where it ended.
    Raises ValueError for a model without experts, and where `out` holds the trace of other prompts.
    """
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record
    from semmoe.engines.transformers.tokenizer import load_tokenizer
    from semmoe.traces.dataset import Prompt, encode

    asked = settings or ProfileSettings()
    texts = [Prompt(text=text) for text in prompts]
    ids = encode(texts[: asked.limit or None], load_tokenizer(model), asked.max_prompt_tokens)
    stated = {"decode": asked.max_new_tokens, "max_prompt_tokens": asked.max_prompt_tokens}
    return record(load_model(model), model, ids, Path(out), progress, asked.max_new_tokens, asked.batch_size, stated)
