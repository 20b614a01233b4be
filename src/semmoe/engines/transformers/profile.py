"""Profile a model from Python: the public `semmoe.profile`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from semmoe.core import RoutingTrace
from semmoe.settings import ProfileSettings
from semmoe.trace import TraceHeader, TraceWriter, open_trace


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
    from semmoe.dataset import Prompt, digest, encode
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record_prompts
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    settings = settings or ProfileSettings()
    texts = [Prompt(text=text) for text in prompts]
    ids = encode(texts[: settings.limit or None], load_tokenizer(model), settings.max_prompt_tokens)
    stated = {"decode": settings.max_new_tokens, "max_prompt_tokens": settings.max_prompt_tokens}
    identity = fingerprint_of(model)
    header = TraceHeader(fingerprint=identity, dataset_hash=digest(ids), settings=stated)
    with TraceWriter(Path(out), header) as writer:
        progress(writer.num_requests)
        record_prompts(
            load_model(model),
            ids,
            writer,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            progress=progress,
        )
    return open_trace(out)
