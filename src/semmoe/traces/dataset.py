"""Prompts from a user's file: JSON lines, a JSON array or object, or text. `prompts` reads the records."""

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.io.bounds import check_range
from semmoe.io.files import read_limited
from semmoe.traces.prompts import Prompt, UnusableError, is_conversation, prompts_of
from semmoe.traces.texts import chunks

TEXT_CHUNK = 2000  # characters of a request cut from a plain-text file
MAX_BYTES = 4 << 30  # after unpacking; a million chats are below 3 GB, and a gzip file of 4 MB could unpack to this
JSON = (".jsonl", ".json")
TABLES = (".csv", ".tsv", ".parquet", ".xlsx", ".xls", ".arrow", ".feather")
SURROGATE = re.compile(r"[\ud800-\udfff]")
# A chat template that loops over the parts of a message is given parts, any other is given text.
READS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
MIN_RECORDS = 10  # a tenth of fewer records is less than one record
MAX_REASONS = 6  # that a message names


@dataclass
class LeftOut:
    """Counts of the records of a dataset that are left out, by reason."""

    path: Path
    strict: bool = False  # raise ValueError at the first
    records: int = 0  # all that were read, also those left out
    conversations: int = 0  # of the records
    reasons: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def add(self, where: str, error: UnusableError) -> None:
        if self.strict:
            raise ValueError(f"{self.path}, {where}: {error}")
        self.first = self.first or f"{where}: {error}"
        self.reasons[error.reason] += 1

    def check(self) -> None:
        """Raise ValueError if nothing is left, or if more than a tenth of ten or more records is left out."""
        count = self.reasons.total()
        if count == self.records:
            raise ValueError(f"{self.path} holds no usable prompt: {self}" if count else f"{self.path} holds no prompt")
        if self.records >= MIN_RECORDS and 10 * count > self.records:
            raise ValueError(f"{self.path}: {self}; more than a tenth: correct the file or remove these records")

    def counts(self) -> dict[str, int | dict[str, int]]:
        """Return the counts as a command prints them with `--json`."""
        return {"records": self.records, "left_out": dict(self.reasons)}

    def __str__(self) -> str:
        kind = "conversations" if self.conversations == self.records else "records"
        reasons = [f"{reason} ({count})" for reason, count in self.reasons.most_common(MAX_REASONS)]
        reasons += ["..."] if len(self.reasons) > MAX_REASONS else []
        return f"{self.reasons.total()} of {self.records} {kind} left out: {', '.join(reasons)}; first: {self.first}"


def read_prompts(path: Path, left_out: LeftOut) -> Iterator[Prompt]:
    """Yield the prompts of a file, and count its records. Raises ValueError for a file that is not read at all."""
    if not path.is_file():
        raise ValueError(f"no dataset file at {path}")
    suffix = _suffix(path)
    if suffix in TABLES:
        convert = 'convert it to jsonl first, one {"prompt": "..."} per line'
        raise ValueError(f"{path} is a {suffix} table, of which semmoe does not know the columns: {convert}")
    try:
        content = str(read_limited(path, MAX_BYTES), "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error})") from None
    for where, row in _records(content, path):
        left_out.conversations += is_conversation(row)
        try:
            if isinstance(row, UnusableError):
                raise row
            prompts = prompts_of(row)
        except UnusableError as error:
            left_out.records += 1
            left_out.add(where, error)
        else:
            left_out.records += len(prompts)
            yield from (replace(prompt, where=where) for prompt in prompts)


def is_running_text(path: Path) -> bool:
    """Whether a dataset is running text, whose prompts are pieces of the text and not its lines."""
    return _suffix(path) not in JSON


def _suffix(path: Path) -> str:
    """The suffix in lower case, without .gz."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _records(content: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each record: the entries of a `.json` file's array, its only value, or each line's value.

    Running text is cut at line ends into pieces, which are the records. A value that is not JSON comes as an
    `UnusableError`. A `.json` file that does not begin with an array may hold JSON lines. Raises ValueError if it
    begins an array that is not JSON.
    """
    if is_running_text(path):
        pieces = chunks(content + "\n", TEXT_CHUNK) or [content]
        yield from ((f"piece {i + 1}", {"text": piece}) for i, piece in enumerate(pieces) if piece.strip())
        return
    if _suffix(path) == ".json":
        whole = _value(content)
        if isinstance(whole, list):
            yield from ((f"entry {i + 1}", row) for i, row in enumerate(whole))
            return
        if not isinstance(whole, UnusableError):
            yield "line 1", whole
            return
        if content.lstrip().startswith("["):
            raise ValueError(f"{path} is {whole}")
    for i, line in enumerate(StringIO(content, newline="\n")):
        if line.strip():
            yield f"line {i + 1}", _value(line)


def _value(text: str) -> Any:
    """Return the JSON value of a text, or an `UnusableError`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return UnusableError("not valid JSON", f"{error.msg} at column {error.colno}")
    except RecursionError as error:
        return UnusableError("not valid JSON", error)


def encode(prompts: Iterable[Prompt], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """The first `max_tokens` token ids of each prompt, with the tokenizer's chat template if it has one."""
    return [_encode_one(prompt, tokenizer)[:max_tokens] for prompt in prompts]


def encode_usable(
    prompts: Iterable[Prompt], tokenizer: Any, config: Mapping[str, Any], left_out: LeftOut
) -> Iterator[list[int]]:
    """Yield the token ids of each prompt that a server of the model would take, and count the others in `left_out`.

    config: the model's `config.json`.
    """
    for prompt in prompts:
        try:
            ids = _encode_one(prompt, tokenizer)
            _check_ids(ids, config.get("vocab_size"), config.get("max_position_embeddings"))
        except UnusableError as error:
            left_out.add(prompt.where, error)
        else:
            yield ids


def _check_ids(ids: list[int], vocab_size: Any, most: Any) -> None:
    if not ids:
        raise UnusableError("an empty prompt")
    if isinstance(most, int) and len(ids) > most:
        raise UnusableError("longer than the model takes", f"{len(ids)} tokens of at most {most}")
    if isinstance(vocab_size, int) and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UnusableError("token ids out of range", f"{min(ids)} to {max(ids)} in a vocabulary of {vocab_size}")


def _encode_one(prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.token_ids:
        return list(prompt.token_ids)
    text, special = text_of(prompt, tokenizer)
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def text_of(prompt: Prompt, tokenizer: Any) -> tuple[str, bool]:
    """Return a prompt's text, by the tokenizer's chat template if it has one, and whether special tokens are added.

    Raises UnusableError for a prompt that cannot be rendered.
    """
    templated = bool(prompt.messages and getattr(tokenizer, "chat_template", None))
    plain = prompt.text or "\n".join(message["content"] for message in prompt.messages)
    text = _rendered(prompt, tokenizer) if templated else plain
    if not text.isascii() and SURROGATE.search(text):
        raise UnusableError("a lone surrogate, which is not a character")
    return text, not templated if prompt.special is None else prompt.special


def _rendered(prompt: Prompt, tokenizer: Any) -> str:
    """Render a conversation. Raises UnusableError with the chat template's own words."""
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) & set(prompt.variables)
    if reserved:
        raise UnusableError("a request that sets what no template reads", ", ".join(sorted(reserved)))
    messages = [_for_template(message, str(tokenizer.chat_template)) for message in prompt.messages]
    variables: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
    variables |= prompt.variables
    variables |= {"continue_final_message": True} if prompt.ends == "continued" else {}
    begins = prompt.ends == "answer"
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=begins, tokenize=False, **variables)
    except ImportError:  # jinja2 is missing
        raise
    except Exception as error:  # an untrusted template may raise anything
        raise UnusableError("the model's chat template refuses it", str(error) or type(error).__name__) from None


def _for_template(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return a message as vLLM gives it to a chat template, which may know no developer, or loop over content parts."""
    unknown = message["role"] == "developer" and "developer" not in template
    role = "system" if unknown else message["role"]
    content = message["content"]
    if READS_PARTS.search(template):
        content = [{"type": "text", "text": content}]
    return {**message, "role": role, "content": content}


def check_token_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ValueError unless there is a prompt, no prompt is empty, and all ids are in the vocabulary."""
    if not prompts:
        raise ValueError("there are no prompts")
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise ValueError(f"prompt {empty[0]} holds no token")
    check_range("token id", np.concatenate(prompts), vocab_size, "vocabulary entries")


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over token ids; a profile can only be resumed on the same prompts."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(f"{len(prompt)}:{','.join(map(str, prompt))};".encode())
    return sha.hexdigest()
