"""Read the token ids of a request's prompt, as the engine will see them, from the request's body.

A prompt that cannot be known here (images, a chat template of the client's own, a stored conversation) is None. An
engine may render a prompt a little differently, for example its tools: the prompt's score hardly changes.
"""

import json
import logging
from typing import Any

import jinja2  # noqa: F401  # chat templates need it, and transformers reports its absence only when it renders one
import numpy as np

from semmoe.traces.dataset import text_of
from semmoe.traces.prompts import Prompt, UnusableError, request_prompts

log = logging.getLogger(__name__)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")  # whose prompts are read
MAX_ID = 1 << 31


class Tokenizer:
    """A Hugging Face tokenizer that several threads can use at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # it keeps no state between calls and releases the GIL
            self._fast.no_truncation()
            self._fast.no_padding()

    def encode(self, text: str, special: bool) -> np.ndarray:
        """(n,) int64 token ids; special: with the tokens that the tokenizer adds around a text."""
        if self._fast is None:
            return np.array(self._tokenizer.encode(text, add_special_tokens=special), np.int64)
        return np.array(self._fast.encode(text, add_special_tokens=special).ids, np.int64)

    def ids(self, prompt: Prompt) -> np.ndarray:
        """(n,) int64 token ids of a prompt. Raises UnusableError for one that cannot be known."""
        if prompt.token_ids:
            if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < MAX_ID:
                raise UnusableError("token ids out of range")
            return np.array(prompt.token_ids, np.int64)
        if prompt.messages and not self._tokenizer.chat_template:
            raise UnusableError("a conversation, and the tokenizer has no chat template")
        return self.encode(*text_of(prompt, self._tokenizer))


def read_prompt(path: str, body: bytes, tokenizer: Tokenizer) -> np.ndarray | None:
    """(n,) int64 ids of all prompts of a request to one of `PATHS`; None if they cannot be known."""
    try:
        request = json.loads(body)
        prompts = request_prompts(request, path) if isinstance(request, dict) else []
        return np.concatenate([tokenizer.ids(prompt) for prompt in prompts]) if prompts else None
    except (ValueError, RecursionError):
        return None
    except Exception as error:  # the message could quote the prompt
        log.warning("semmoe: a prompt cannot be read, so load decides: %s", type(error).__name__)
        return None
