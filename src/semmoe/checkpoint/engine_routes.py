"""Read the routing of tokens that engines write without semmoe, as requests of a trace.

Each line of a `.jsonl` file is an answer. vLLM: `choices` with token ids (`return_token_ids`) and `routed_experts`
(`--enable-return-routed-experts`), base64 of an array. SGLang's `/generate`: `output_ids` and `meta_info` with
`routed_experts`, base64 of int32; the user adds the prompt's `input_ids`. Nested lists are read in place of base64.

An engine routes all tokens but the last that it sampled. It may omit the rows at the front, of a cached prefix.
"""

import base64
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint.engine_maps import Model, numbers, whole
from semmoe.io.files import MOST_JSON_BYTES
from semmoe.traces.dataset import LeftOut
from semmoe.traces.prompts import UnusableError
from semmoe.traces.routing import check_left_out, impossible_tokens
from semmoe.traces.trace import TraceWriter

NUMPY_MAGIC = b"\x93NUMPY"
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError)


@dataclass
class Source:
    """The file that routes are read from, its model, and counts of lines that are left out."""

    path: Path
    model: Model
    left_out: LeftOut  # lines


@dataclass(frozen=True)
class Request:
    """The routing of a request: prompt (M,), routed tokens (T,) from position `first` on, their experts (T, L, K)."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    expert_ids: np.ndarray
    first: int = 0


def write_requests(writer: TraceWriter, requests: Iterable[Request], source: Source) -> dict[str, int]:
    """Write requests to a trace; tokens that name an expert twice, which no router does, are left out.

    Returns the numbers of requests and tokens that were written, and of tokens that were left out. Raises ValueError if
    nothing is left, or for too many impossible tokens.
    """
    tokens = impossible = 0
    for request in requests:
        kept = ~impossible_tokens(request.expert_ids)
        positions = request.first + np.arange(len(kept))
        writer.append_run(request.prompt_ids, request.token_ids[kept], request.expert_ids[kept], positions[kept])
        tokens += int(kept.sum())
        impossible += int((~kept).sum())
    check_left_out(str(source.path), impossible, tokens + impossible)
    if not tokens:
        raise ValueError(f"{source.path} has the routing of no token")
    return {"requests": writer.num_requests, "tokens": tokens, "impossible_tokens": impossible}


def _token_ids(ids: Any, model: Model) -> np.ndarray:
    """(T,) int64 token ids. Raises ValueError for one that the model does not have."""
    return whole("token", numbers([ids]), model.fingerprint.vocab_size - 1)[0]


def read_answers(path: Path, source: Source) -> Iterator[Request]:
    """Yield the requests of engines' answers, one for each choice; other lines are counted and left out.

    Raises ValueError at the end if more than a tenth of the lines is left out.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = iter(lambda: file.readline(MOST_JSON_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            source.left_out.records += 1
            try:
                requests = list(_requests_of_line(line, source.model))
            except DAMAGED as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                source.left_out.add(f"line {number}", UnusableError("no answer with routed experts", reason))
            else:
                yield from requests
    source.left_out.check()


def _requests_of_line(line: bytes, model: Model) -> Iterator[Request]:
    """The requests of a line, which holds an answer or a list of answers."""
    parsed = json.loads(line)
    for answer in parsed if isinstance(parsed, list) else [parsed]:
        if "meta_info" in answer:
            prompt = answer["input_ids"] if "input_ids" in answer else answer["prompt_token_ids"]
            yield _routed(answer["meta_info"]["routed_experts"], prompt, answer["output_ids"], model)
            continue
        for choice in answer["choices"]:
            if not choice.get("routed_experts") or not choice.get("token_ids"):
                raise ValueError("give the server --enable-return-routed-experts, and requests return_token_ids")
            prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
            yield _routed(choice["routed_experts"], prompt, choice["token_ids"], model)


def _routed(encoded: Any, prompt: list[int], sampled: list[int], model: Model) -> Request:
    """The request of a prompt and its sampled tokens, whose last one was not fed to the model."""
    prompts = _token_ids(prompt, model)
    tokens = _token_ids([*prompt, *sampled][:-1], model)
    experts = _rows(encoded, len(tokens), model)
    first = len(tokens) - len(experts)  # the rows of a cached prefix may be omitted
    if first < 0 or (first > 0 and first >= len(prompts)):
        raise ValueError(f"routed_experts has {len(experts)} rows for {len(tokens)} tokens that ran")
    by_layer = model.moe_rows(experts.swapaxes(0, 1))
    return Request(prompts, tokens[first:], by_layer.swapaxes(0, 1), first)


def _rows(encoded: Any, num_tokens: int, model: Model) -> np.ndarray:
    """(rows, layers, K) expert ids from base64 of an array, base64 of int32 without a shape, or nested lists."""
    top_k = model.fingerprint.top_k
    if isinstance(encoded, str):
        content = base64.b64decode(encoded, validate=True)
        npy = content.startswith(NUMPY_MAGIC)
        found = np.load(io.BytesIO(content), allow_pickle=False) if npy else _of_int32(content, num_tokens, model)
    else:
        found = numbers(encoded)
    if found.ndim != 3 or found.shape[2] != top_k:
        raise ValueError(f"routed_experts has shape {found.shape}, not ({num_tokens}, layers, {top_k})")
    experts = whole("expert", found.reshape(len(found), -1), model.fingerprint.num_experts - 1)
    return experts.reshape(found.shape)


def _of_int32(content: bytes, num_tokens: int, model: Model) -> np.ndarray:
    """SGLang's ids, which come without a shape: rows of all decoder layers, or of the MoE layers alone."""
    top_k = model.fingerprint.top_k
    ids = np.frombuffer(content, "<i4").reshape(-1, top_k)
    for layers in (model.decoder_layers[1], model.fingerprint.num_layers):
        if len(ids) % layers == 0 and len(ids) // layers <= num_tokens:
            return ids.reshape(-1, layers, top_k)
    raise ValueError(f"routed_experts has {ids.size} ids, which are not those of {num_tokens} tokens or fewer")
