"""Prompts from a user's file: jsonl in ShareGPT, OpenAI chat, OpenAI batch or `{"prompt": ...}` format, or text."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semmoe.files import read_limited
from semmoe.texts import chunks

TEXT_CHUNK = 2000  # characters of a request cut from a plain-text file
MAX_BYTES = 4 << 30  # after unpacking; a million chats are below 3 GB, and a gzip file of 4 MB could unpack to this
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
JSON = (".jsonl", ".json")
PROMPT_KEYS = ("prompt", "text", "question")
TABLES = (".csv", ".tsv", ".parquet", ".xlsx", ".xls", ".arrow", ".feather")
TEXT_PARTS = ("text", "input_text", "output_text")  # the types of message parts that hold text


@dataclass(frozen=True)
class Prompt:
    """One request: a text, chat messages, or token ids; exactly one of them is set."""

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    token_ids: tuple[int, ...] = ()


def load_dataset(path: Path | str, limit: int = 0) -> list[Prompt]:
    """The first `limit` prompts of a file, all if 0. Raises ValueError that names the faulty line."""
    path = Path(path)
    if limit < 0:
        raise ValueError(f"limit must not be negative: {limit}")
    if not path.is_file():
        raise ValueError(f"there is no dataset file at {path}")
    suffix = _suffix(path)
    if suffix in TABLES:
        convert = 'convert it to jsonl first, one {"prompt": "..."} per line'
        raise ValueError(f"{path} is a {suffix} table, of which semmoe does not know the columns: {convert}")
    try:
        content = str(read_limited(path, MAX_BYTES), "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error})") from None
    prompts = list(_json_prompts(content, path)) if suffix in JSON else _pieces(content)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts[:limit] if limit else prompts


def is_running_text(path: Path) -> bool:
    """Whether a dataset is running text, whose prompts are pieces of the text and not its lines."""
    return _suffix(path) not in JSON


def _suffix(path: Path) -> str:
    """The suffix in lower case, without .gz."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _pieces(content: str) -> list[Prompt]:
    """Prompts from running text, which is cut at line ends."""
    pieces = chunks(content + "\n", TEXT_CHUNK) or [content]
    return [Prompt(text=piece) for piece in pieces if piece.strip()]


def _json_prompts(content: str, path: Path) -> Iterator[Prompt]:
    if content.lstrip().startswith("["):
        rows = _parsed(content, str(path))
        yield from (_prompt(row, f"{path}, entry {i + 1}") for i, row in enumerate(rows))
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _prompt(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _prompt(row: Any, where: str, keys: Sequence[str] = PROMPT_KEYS) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object")
    if isinstance(row.get("body"), dict):  # a batch file; only there is `input` a prompt and not other data
        return _prompt(row["body"], where, (*PROMPT_KEYS, "input"))
    for key in ("messages", "conversation", "conversations"):
        if key in row:
            return Prompt(messages=_messages(row[key], where))
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return Prompt(text=value)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return Prompt(token_ids=tuple(value))
    raise ValueError(f"{where} has no messages, conversations or prompt, only {sorted(row)}")


def _messages(turns: Any, where: str) -> tuple[tuple[str, str], ...]:
    """The conversation without the answers at its end, the same as it is sent to a server."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where} holds an empty conversation")
    out = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError(f"{where}: a turn is not a JSON object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        out.append((ROLES.get(str(role), str(role)), _content(content, where)))
    while len(out) > 1 and out[-1][0] == "assistant":
        out.pop()
    return tuple(out)


def _content(content: Any, where: str) -> str:
    """The text of a turn. OpenAI's content parts are joined with newlines, the same as in engines and the router."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: a turn has no text content")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS or not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: a turn has a content part of type {kind!r}, and only text is read")
    return "\n".join(part["text"] for part in content)


def encode(prompts: Sequence[Prompt], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """The first `max_tokens` token ids of each prompt, with the tokenizer's chat template if it has one."""
    return [_encode_one(prompt, tokenizer)[:max_tokens] for prompt in prompts]


def _encode_one(prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.token_ids:
        return list(prompt.token_ids)
    if prompt.messages and getattr(tokenizer, "chat_template", None):
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    text = prompt.text or "\n".join(content for _, content in prompt.messages)
    return tokenizer(text)["input_ids"]


def check_token_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError unless there is a prompt, no prompt is empty, and all ids are in the vocabulary."""
    if not prompts:
        raise ValueError("there is no prompt")
    empty = next((i for i, prompt in enumerate(prompts) if len(prompt) == 0), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} holds no token")
    wrong = next((t for prompt in prompts for t in (min(prompt), max(prompt)) if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is out of range for a vocabulary of {vocab_size}")


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over token ids; a profile can only be resumed on the same prompts."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(f"{len(prompt)}:{','.join(map(str, prompt))};".encode())
    return sha.hexdigest()
