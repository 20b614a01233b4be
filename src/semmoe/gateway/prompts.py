"""Read the token ids of a request's prompt, as the engine will see them, from the request's body.

A prompt that cannot be known here (images, a chat template of the client's own, a stored conversation) is None. An
engine may render a prompt a little differently, for example its tools: the prompt's score hardly changes.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable
from typing import Any, TypeGuard

import jinja2  # noqa: F401  # chat templates need it, and transformers reports its absence only when it renders one
import numpy as np

log = logging.getLogger(__name__)
Body = dict[str, Any]
TEXT_PARTS = ("text", "input_text", "output_text")
NOT_IN_CONTENT = ("tool_result", "tool_use", "thinking", "redacted_thinking")  # Anthropic's blocks
# A chat template that loops over the parts of a message is given parts, any other is given text.
READS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")


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
        if self._fast is None:
            return np.array(self._tokenizer.encode(text, add_special_tokens=special), np.int64)
        return np.array(self._fast.encode(text, add_special_tokens=special).ids, np.int64)

    def render(self, messages: list[Body], variables: Any, **options: Any) -> str | None:
        """The text of a conversation, or None. Extra variables must not replace `apply_chat_template`'s arguments."""
        if self._tokenizer.chat_template is None or not isinstance(variables, dict) or self._reserved & set(variables):
            return None
        prepared = [self._message(message) for message in messages]
        if None in prepared:
            return None
        return self._tokenizer.apply_chat_template(prepared, tokenize=False, **options, **variables)

    def _message(self, message: Body) -> Body | None:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text(part) for part in content]
            if None in texts:
                return None
            parts = [{"type": "text", "text": text} for text in texts]
            content = parts if self._reads_parts else "\n".join(map(str, texts))
        out = {**message, "content": "" if content is None else content}
        if isinstance(message.get("tool_calls"), list):
            out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        return out


def read_prompt(path: str, body: bytes, tokenizer: Tokenizer) -> np.ndarray | None:
    """(n,) int64 ids of all prompts of a request to a path of `READERS`; None if they cannot be known."""
    try:
        request = json.loads(body)
        return READERS[path](request, tokenizer) if isinstance(request, dict) else None
    except (ValueError, RecursionError):
        return None
    except Exception as error:  # from a chat template, for instance; the message could quote the prompt
        log.warning("semmoe: a prompt cannot be read, so load decides: %s", type(error).__name__)
        return None


def _completion(request: Body, tokenizer: Tokenizer) -> np.ndarray | None:
    """A text, a list of token ids, or a list of either."""
    prompt: Any = request.get("prompt")
    given = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    found = [_ids(one, tokenizer, request.get("add_special_tokens") is not False) for one in given]
    known = [ids for ids in found if ids is not None]
    return np.concatenate(known) if len(known) == len(found) else None


def _ids(value: Any, tokenizer: Tokenizer, special: bool) -> np.ndarray | None:
    if isinstance(value, str):
        return tokenizer.encode(value, special)
    are_ids = isinstance(value, list) and value and all(type(one) is int and 0 <= one < 1 << 31 for one in value)
    return np.array(value, np.int64) if are_ids else None


def _chat(request: Body, tokenizer: Tokenizer) -> np.ndarray | None:
    messages, variables = request.get("messages"), request.get("chat_template_kwargs") or {}
    if not _are_objects(messages) or request.get("chat_template") or request.get("documents"):
        return None
    if isinstance(variables, dict) and request.get("reasoning_effort"):
        variables = {"reasoning_effort": request["reasoning_effort"], **variables}
    continued = bool(request.get("continue_final_message"))
    text = tokenizer.render(
        messages,
        variables,
        tools=request.get("tools") or None,
        continue_final_message=continued,
        add_generation_prompt=request.get("add_generation_prompt") is not False and not continued,
    )
    return None if text is None else tokenizer.encode(text, request.get("add_special_tokens") is True)


def _responses(request: Body, tokenizer: Tokenizer) -> np.ndarray | None:
    """Text and messages; only the engine knows the prompt if it refers to tools or to earlier answers."""
    given = request.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not _are_objects(items) or any(request.get(name) for name in ("previous_response_id", "conversation", "tools")):
        return None
    if any(item.get("type", "message") != "message" for item in items):
        return None
    messages = [{"role": item.get("role"), "content": item.get("content")} for item in items]
    return _chat({"messages": _system(request.get("instructions")) + messages}, tokenizer)


def _messages(request: Body, tokenizer: Tokenizer) -> np.ndarray | None:
    """Anthropic's messages, which engines answer as a chat."""
    turns, tools = request.get("messages"), request.get("tools") or []
    if not _are_objects(turns) or not (tools == [] or _are_objects(tools)):
        return None
    chat = {
        "messages": _system(request.get("system")) + [message for turn in turns for message in _turn(turn)],
        "tools": [_function(tool) for tool in tools],
        "chat_template_kwargs": request.get("chat_template_kwargs"),
    }
    return _chat(chat, tokenizer)


def _turn(turn: Body) -> list[Body]:
    """The chat messages of an Anthropic message: first results of tools, then the rest without earlier thinking."""
    role, blocks = turn.get("role"), turn.get("content")
    if not _are_objects(blocks):
        return [{"role": role, "content": blocks}]
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    content = [block for block in blocks if block.get("type") not in NOT_IN_CONTENT]
    message = {"role": role, "content": content or None} | ({"tool_calls": calls} if calls else {})
    return [*results, message] if content or calls or not results else results


def _function(tool: Body) -> Body:
    """An Anthropic tool as chat templates expect it."""
    known = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": known}


# Prompts of requests to these paths are read.
READERS: dict[str, Callable[[Body, Tokenizer], np.ndarray | None]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}


def _system(content: Any) -> list[Body]:
    return [{"role": "system", "content": content}] if content else []


def _are_objects(value: Any) -> TypeGuard[list[Body]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _text(part: Any) -> str | None:
    """The text of a part of a message; None for other parts."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part
    return text if isinstance(text, str) else None


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates expect; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
