"""Refuse prompts with a token id outside the vocabulary, which end the server in SGLang 0.5.23."""

from collections.abc import Sequence
from typing import Any

MEDIA = ("image_data", "video_data", "audio_data")  # their placeholders lie outside the vocabulary


def validate(original: Any, manager: Any, obj: Any, input_ids: Sequence[int] | None, *args: Any, **kwargs: Any) -> Any:
    """Wraps the tokenizer manager's checks, whose ValueError a client receives as an error 400."""
    out = original(manager, obj, input_ids, *args, **kwargs)
    if input_ids and not any(getattr(obj, name, None) is not None for name in MEDIA):
        size = manager.model_config.vocab_size
        bad = min(input_ids) if min(input_ids) < 0 else max(input_ids)
        if not 0 <= bad < size:
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {size}")
    return out
