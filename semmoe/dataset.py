"""Prompts from a user's file: jsonl in ShareGPT, OpenAI-chat or `{"prompt": ...}` form, or plain text; gzip too."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semmoe.core import require
from semmoe.texts import chunks

TEXT_CHUNK = 2000  # characters of a request cut from a plain-text file
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """One request: a text, chat messages, or token ids."""

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    token_ids: tuple[int, ...] = ()


def load_dataset(path: Path | str, limit: int = 0) -> list[Prompt]:
    """The prompts of a file, the first `limit` of them if that is not 0. Raises ValueError naming the faulty line."""
    path = Path(path)
    require(limit >= 0, f"limit must not be negative: {limit}")
    require(path.is_file(), f"there is no dataset file at {path}")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = raw.decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is truncated, damaged or not UTF-8 ({error})") from None
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in (".jsonl", ".json"):
        prompts = list(_json_prompts(content, path))
    else:
        prompts = [Prompt(text=chunk) for chunk in chunks(content + "\n", TEXT_CHUNK) or [content] if chunk.strip()]
    require(bool(prompts), f"{path} holds no prompt")
    return prompts[:limit] if limit else prompts


def _json_prompts(content: str, path: Path) -> Iterator[Prompt]:
    if content.lstrip().startswith("["):
        try:
            yield from (_prompt(row, f"{path}, entry {i + 1}") for i, row in enumerate(json.loads(content)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from None
            yield _prompt(row, f"{path}, line {number}")


def _prompt(row: Any, where: str) -> Prompt:
    require(isinstance(row, dict), f"{where} is not a JSON object")
    for key in ("messages", "conversation", "conversations"):
        if key in row:
            return Prompt(messages=_messages(row[key], where))
    for key in ("prompt", "text", "question"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return Prompt(text=value)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return Prompt(token_ids=tuple(value))
    raise ValueError(f"{where} has no messages, conversations or prompt, only {sorted(row)}")


def _messages(turns: Any, where: str) -> tuple[tuple[str, str], ...]:
    """The conversation up to its last user turn: what a server would be sent."""
    require(isinstance(turns, list) and bool(turns), f"{where} holds an empty conversation")
    out = []
    for turn in turns:
        require(isinstance(turn, dict), f"{where}: a turn is not a JSON object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        require(isinstance(content, str), f"{where}: a turn has no text content")
        out.append((ROLES.get(str(role), str(role)), content))
    while len(out) > 1 and out[-1][0] == "assistant":
        out.pop()
    return tuple(out)


def encode(prompts: Sequence[Prompt], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, by the chat template where the tokenizer has one; long ones keep their beginning."""
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
    """Raise ValueError unless there are prompts, each holds a token, and all ids are in the vocabulary."""
    require(len(prompts) > 0, "there is no prompt")
    empty = next((i for i, prompt in enumerate(prompts) if len(prompt) == 0), None)
    require(empty is None, f"prompt {empty} holds no token")
    wrong = next((t for prompt in prompts for t in (min(prompt), max(prompt)) if not 0 <= t < vocab_size), None)
    require(wrong is None, f"token id {wrong} is out of range for a vocabulary of {vocab_size}")


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over token ids: what a resumed profile must agree on."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(f"{len(prompt)}:{','.join(map(str, prompt))};".encode())
    return sha.hexdigest()
