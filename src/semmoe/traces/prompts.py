"""Read the prompts of a record of a data set, or of a request: a conversation, a text or token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ASSISTANTS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call")
ROLES = {"human": "user", "user": "user", "system": "system", "observation": "tool"}
ROLES |= dict.fromkeys(ASSISTANTS, "assistant")
TALKS = ("messages", "conversation", "conversations")
PROMPT_KEYS = ("prompt", "text", "question")
ANTHROPIC_BLOCKS = {"tool_result", "tool_use", "thinking", "redacted_thinking"}
TEXT_PARTS = ("text", "input_text", "output_text")  # the types of message parts that hold text
ENDPOINTS = ("completions", "responses", "messages")  # how the URLs end of requests that are read
MAX_WORDS = 200  # characters that a message quotes of a dataset or a chat template


class UnusableError(ValueError):
    """A record that holds no usable prompt. `reason` groups such records; `detail` belongs to this one."""

    def __init__(self, reason: str, detail: object = "") -> None:
        self.reason = _one_line(reason)
        super().__init__(f"{self.reason}: {_one_line(str(detail))}" if detail else self.reason)


@dataclass(frozen=True)
class Prompt:
    """One request: a text, chat messages or token ids; exactly one of the three is set."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()  # `role`, `content` and what else engines give a chat template
    token_ids: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # for the chat template, as the two fields below
    variables: dict[str, Any] = field(default_factory=dict)  # `chat_template_kwargs` of a request
    ends: str = "answer"  # after the messages an answer begins; "continued": the last one continues; "closed": neither
    special: bool | None = None  # whether the tokenizer adds its special tokens; None: to texts, not to conversations
    where: str = field(default="", compare=False)  # line or entry of the dataset


def prompts_of(row: Any) -> list[Prompt]:
    """Return the prompts of a record; a completion request may hold several. Raises UnusableError."""
    if not isinstance(row, dict):
        raise UnusableError("not a JSON object")
    body = row.get("body") or (row.get("params") if "custom_id" in row else None)  # OpenAI's and Anthropic's batches
    if isinstance(body, dict):
        return request_prompts(body, row.get("url"))
    if is_conversation(row):
        return [_published(_turns_of(row), row)]
    return _texts(row, PROMPT_KEYS)


def request_prompts(body: dict[str, Any], url: object) -> list[Prompt]:
    """Return the prompts of a request's body, as a server sees them; url: where it is sent. Raises UnusableError."""
    endpoint, given = _endpoint(url), body.get("input")
    if endpoint == "responses" or (isinstance(given, list) and given and isinstance(given[0], dict)):
        if body.get("previous_response_id") or body.get("conversation"):
            raise UnusableError("a request that continues a stored conversation")
        return [_chat(_items(given), {**body, "system": body.get("instructions")})]
    if is_conversation(body):
        return [_chat(_turns_of(body), body)]
    return _texts(body, (*PROMPT_KEYS, "input"))


def is_conversation(row: Any) -> bool:
    return isinstance(row, dict) and any(row.get(key) is not None for key in TALKS)


def _turns_of(row: dict[str, Any]) -> Any:
    return next(row[key] for key in TALKS if row.get(key) is not None)


def _endpoint(url: object) -> str:
    """The last part of a URL. Raises UnusableError if requests to it are not read."""
    path = url.split("?")[0].rstrip("/") if isinstance(url, str) else ""
    name = path.split("/")[-1]
    if name not in (*ENDPOINTS, "", "v1"):
        raise UnusableError(f"a request to {path}, which is not read")
    return name


def _texts(row: dict[str, Any], keys: Sequence[str]) -> list[Prompt]:
    value = next((row[key] for key in keys if row.get(key)), None)
    if value is None:
        if any(key in row for key in keys):
            raise UnusableError("an empty prompt")
        raise UnusableError("no messages, conversations or prompt", f"only {sorted(row)[:20]}")
    several = isinstance(value, list) and type(value[0]) is not int
    return [_plain(one, row.get("add_special_tokens")) for one in (value if several else [value])]


def _plain(value: Any, special: Any) -> Prompt:
    if value == [] or (isinstance(value, str) and not value.strip()):
        raise UnusableError("an empty prompt")
    if isinstance(value, str):
        return Prompt(text=value, special=special if isinstance(special, bool) else None)
    if isinstance(value, list) and all(type(one) is int for one in value):  # not a bool
        return Prompt(token_ids=tuple(value))
    raise UnusableError("a prompt is neither text nor token ids")


def _published(turns: Any, row: dict[str, Any]) -> Prompt:
    """Return a published conversation without the answers at its end, which a server has not seen.

    Raises UnusableError for an answer before the first user turn: the rest of a conversation that was cut. Answers
    alone are kept: they are text to continue.
    """
    prompt = _chat(turns, row)
    messages = list(prompt.messages)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if "user" in roles and roles[0] != "user":
        raise UnusableError("the first turn is not a user's")
    _require_text(messages)
    return replace(prompt, messages=tuple(messages))


def _chat(turns: Any, row: dict[str, Any]) -> Prompt:
    """Return a conversation. row: its other fields."""
    if not isinstance(turns, list) or not turns:
        raise UnusableError("an empty conversation")
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = [_message(part) for turn in system + turns for part in _split(turn)]
    _require_text(messages)
    ends = "closed" if row.get("add_generation_prompt") is False else "answer"
    return Prompt(
        messages=tuple(messages),
        tools=_tools(row),
        variables=_variables(row),
        ends="continued" if row.get("continue_final_message") else ends,
        special=row.get("add_special_tokens") is True or None,
    )


def _require_text(messages: list[dict[str, Any]]) -> None:
    if not any(message["content"].strip() or "tool_calls" in message for message in messages):
        raise UnusableError("an empty prompt")


def _split(turn: Any) -> list[Any]:
    """Return the chat messages of a turn. Anthropic's has results of tools, which come first, calls and thinking."""
    blocks = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(blocks, list) or not {_kind(block) for block in blocks} & ANTHROPIC_BLOCKS:
        return [turn]
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
        for block in blocks
        if _kind(block) == "tool_result"
    ]
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if _kind(block) == "tool_use"
    ]
    content = [block for block in blocks if _kind(block) not in ANTHROPIC_BLOCKS]
    message = {"role": turn.get("role"), "content": content or None} | ({"tool_calls": calls} if calls else {})
    return [*results, message] if content or calls else results


def _items(given: Any) -> Any:
    """Return the turns of the input of a request to /v1/responses."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise UnusableError("an input item is not a message", f"its type is {_kind(item)!r}")
    return given


def _message(turn: Any) -> dict[str, Any]:
    """Return a turn as vLLM and SGLang give it to a chat template."""
    if not isinstance(turn, dict):
        raise UnusableError("a turn is not a JSON object")
    role, calls = turn.get("role") or turn.get("from"), turn.get("tool_calls")
    if not isinstance(role, str):
        raise UnusableError("a turn has no role")
    content = turn.get("content", turn.get("value"))
    message: dict[str, Any] = {
        "role": ROLES.get(role.lower(), role),
        "content": "" if calls and content is None else _text(content),
    }
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    if calls:
        message["tool_calls"] = [_call(call) for call in _objects(calls, "tool calls")]
    return message


def _text(content: Any) -> str:
    """The text of a turn. OpenAI's content parts are joined with newlines, the same as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableError("a turn has no text content")
    for part in content:
        if _kind(part) not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UnusableError("a turn has content that is not text", f"a content part of type {_kind(part)!r}")
    return "\n".join(part["text"] for part in content)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. vLLM replaces any other arguments by an empty object."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise UnusableError("a tool call without a function")
    arguments = _parsed(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a request as vLLM gives them to a chat template. Published data sets have them as JSON text."""
    if row.get("functions"):
        raise UnusableError("`functions`, which OpenAI has replaced by `tools`")
    return tuple(_tool(tool) for tool in _objects(_parsed(row.get("tools")) or [], "tools"))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """One tool; Anthropic, the Responses API and some data sets omit the outer object."""
    inner = tool.get("function", tool)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise UnusableError("a tool is not a function", f"its type is {_kind(tool)!r}")
    function = {
        "name": inner["name"],
        "description": inner.get("description"),
        "parameters": inner.get("parameters", inner.get("input_schema")),
    }
    strict = {} if inner.get("strict") is None else {"strict": inner["strict"]}
    return {"type": "function", "function": function | strict}


def _variables(row: dict[str, Any]) -> dict[str, Any]:
    """The variables that a request adds for the chat template."""
    given = row.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or row.get("chat_template") or "chat_template" in given:
        raise UnusableError("a request with another chat template, or with variables that are not a JSON object")
    if row.get("documents"):
        raise UnusableError("a request with documents")
    effort = row.get("reasoning_effort")
    return {**({"reasoning_effort": effort} if isinstance(effort, str) else {}), **given}


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise UnusableError(f"{name} are not a list of JSON objects")
    return value


def _kind(value: Any) -> str:
    """Return the `type` of an object, or "unknown" where that is not text."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else "unknown"


def _parsed(value: Any) -> Any:
    """What JSON text holds; other text is stripped, and other values are as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value.strip()


def _one_line(text: str) -> str:
    """Return untrusted text for a message: printable, on one line, and short."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:MAX_WORDS]).split())
