"""The token ids of a request's prompt, as the engine will see them, from the request's body.

A prompt that cannot be known here (images, a chat template of the client's own, a stored conversation) is None, and the
engine chooses the rank. It does no harm if an engine renders a prompt a little differently, for example its tools: the
prompt's score hardly changes, and its prefix is compared with prefixes that were rendered here in the same way.
"""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Body = dict[str, Any]
Lists = list[np.ndarray]  # (n,) int64 per prompt
MAX_ANSWERS = 1024
# A chat template that loops over the parts of a message is given parts, any other is given text.
READS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")


@dataclass(frozen=True)
class Prompt:
    """What scheduling needs to know of a request."""

    ids: np.ndarray | None  # (n,) int64, all prompts of the request concatenated; None if they cannot be known
    max_new_tokens: int | None = None  # per answer
    answers: int = 1
    rank: int | None = None  # named in the body, which SGLang allows


class Tokenizer:
    """A Hugging Face tokenizer that several threads can use at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # it keeps no state between calls and releases the GIL
            self._fast.no_truncation()
            self._fast.no_padding()
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        template = tokenizer.chat_template
        self._reads_parts = isinstance(template, str) and READS_PARTS.search(template) is not None

    def encode(self, text: str, special: bool) -> np.ndarray:
        """(n,) int64 token ids; special: with the tokens that the tokenizer adds around a text."""
        if self._fast is not None:
            return np.array(self._fast.encode(text, add_special_tokens=special).ids, np.int64)
        return np.array(self._tokenizer.encode(text, add_special_tokens=special), np.int64)

    def render(self, messages: list[Body], tools: Any, continued: bool, generate: bool, variables: Any) -> str | None:
        """The text of a conversation; None if there is no template, or it cannot be rendered here.

        continued: the answer continues the last message; generate: append the beginning of an answer; variables: extra
        variables for the template, which must not replace arguments of `apply_chat_template`.
        """
        if self._tokenizer.chat_template is None or not isinstance(variables, dict) or self._reserved & set(variables):
            return None
        prepared = [self._message(message) for message in messages]
        if any(message is None for message in prepared):
            return None
        return self._tokenizer.apply_chat_template(
            prepared,
            tools=tools or None,
            tokenize=False,
            continue_final_message=continued,
            add_generation_prompt=generate and not continued,
            **variables,
        )

    def _message(self, message: Body) -> Body | None:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text(part) for part in content]
            if any(text is None for text in texts):
                return None
            parts = [{"type": "text", "text": text} for text in texts]
            content = parts if self._reads_parts else "\n".join(map(str, texts))
        out = {**message, "content": "" if content is None else content}
        if isinstance(message.get("tool_calls"), list):
            out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        return out


def read_prompt(path: str, body: bytes, tokenizer: Tokenizer | None) -> Prompt:
    """The prompt of a request to one of `ENDPOINTS`; unknown for an invalid request, which the engine will refuse."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return Prompt(None)
    if not isinstance(request, dict):
        return Prompt(None)
    found, sampling = ENDPOINTS[path](request, tokenizer), _sampling(request)
    length, prompts = _first_count(sampling, *LENGTHS), len(found or [0])
    return Prompt(
        ids=np.concatenate(found) if found else None,
        max_new_tokens=DEFAULT_LENGTHS.get(path) if length is None else length,
        answers=min(prompts * (_first_count(sampling, "n") or 1), MAX_ANSWERS),
        rank=_first_count(request, "routed_dp_rank", "data_parallel_rank"),
    )


LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
DEFAULT_LENGTHS = {"/v1/completions": 16, "/generate": 128}  # if a request gives no length


def _sampling(request: Body) -> Body:
    """The object that holds n and the length: the body, or its `sampling_params` (/generate)."""
    own = request.get("sampling_params")
    return own if isinstance(own, dict) else request


def _first_count(values: Body, *names: str) -> int | None:
    """The first of these fields that is an integer and not negative."""
    return next((values[name] for name in names if _is_int(values.get(name)) and values[name] >= 0), None)


def _completion(request: Body, tokenizer: Tokenizer | None) -> Lists | None:
    return _lists(request.get("prompt"), tokenizer, request.get("add_special_tokens") is not False)


def _generate(request: Body, tokenizer: Tokenizer | None) -> Lists | None:
    """SGLang's native endpoint."""
    if any(request.get(name) for name in ("input_embeds", "image_data", "video_data", "audio_data")):
        return None
    given = request.get("input_ids")
    return _lists(request.get("text") if given is None else given, tokenizer, True)


def _tokens_in(request: Body, tokenizer: Tokenizer | None) -> Lists | None:
    """vLLM's endpoint for clients that tokenise prompts themselves."""
    return None if request.get("features") else _lists(request.get("token_ids"), None, True)


def _chat(request: Body, tokenizer: Tokenizer | None) -> Lists | None:
    messages = _objects(request.get("messages"))
    if tokenizer is None or messages is None or request.get("chat_template") or request.get("documents"):
        return None
    effort = {"reasoning_effort": request["reasoning_effort"]} if request.get("reasoning_effort") else {}
    variables = request.get("chat_template_kwargs") or {}
    text = tokenizer.render(
        messages,
        request.get("tools"),
        bool(request.get("continue_final_message")),
        request.get("add_generation_prompt") is not False,
        {**effort, **variables} if isinstance(variables, dict) else None,
    )
    return None if text is None else [tokenizer.encode(text, request.get("add_special_tokens") is True)]


def _responses(request: Body, tokenizer: Tokenizer | None) -> Lists | None:
    """Text and messages; only the engine knows the prompt if it refers to tools or to earlier answers."""
    given = request.get("input")
    items = _objects([{"role": "user", "content": given}] if isinstance(given, str) else given)
    if items is None or any(request.get(name) for name in ("previous_response_id", "conversation", "tools")):
        return None
    if any(item.get("type", "message") != "message" for item in items):
        return None
    before = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    messages = [{"role": item.get("role"), "content": item.get("content")} for item in items]
    return _chat({"messages": before + messages}, tokenizer)


# POST requests to these paths are scheduled; all others are forwarded.
ENDPOINTS: dict[str, Callable[[Body, Tokenizer | None], Lists | None]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/generate": _generate,
    "/inference/v1/generate": _tokens_in,
}


def _lists(value: Any, tokenizer: Tokenizer | None, special: bool) -> Lists | None:
    """Prompts from a text, a list of token ids, or a list of either."""
    several = isinstance(value, list) and value and not _is_int(value[0])
    found = [_list(one, tokenizer, special) for one in (value if several else [value])]
    known = [ids for ids in found if ids is not None]
    return known if len(known) == len(found) else None


def _list(value: Any, tokenizer: Tokenizer | None, special: bool) -> np.ndarray | None:
    if isinstance(value, str) and tokenizer is not None:
        return tokenizer.encode(value, special)
    if not isinstance(value, list) or not value or not all(map(_is_int, value)):
        return None
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return None


def _is_int(value: object) -> bool:
    return type(value) is int


def _objects(value: Any) -> list[Body] | None:
    return value if isinstance(value, list) and value and all(isinstance(one, dict) for one in value) else None


def _text(part: Any) -> str | None:
    """The text of one part of a message; None if it is no text."""
    if isinstance(part, str):
        return part
    known = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
    return part["text"] if known and isinstance(part.get("text"), str) else None


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates expect; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
