"""What engines write about experts without semmoe: maps of physical experts, counts, and the routing of tokens.

A map becomes a plan. So do counts, by EPLB: they say how often experts are used, and not by which tokens or together
with which others, so that no tables can be made of them. Routing becomes a trace. Read are

- maps `physical_to_logical_map`, (L, P) or one row for all layers: JSON of vLLM's pull request 49572 and of SGLang,
  `.npy` of what DeepSeek's EPLB returns, `.pt` of SGLang;
- counts `logical_count`: `.pt` of SGLang's expert distribution, and what `semmoe record start --counts-only` left;
- SGLang's expert distribution in the modes `per_pass` and `per_token` (`.pt`), whose passes name no request: first
  chunks of prompts are read, later chunks and decoded tokens are counted and left out;
- vLLM's answers with `routed_experts` and token ids (`--enable-return-routed-experts`, `return_token_ids`), an answer
  of its HTTP interface in each line of a `.jsonl` file.

Files are untrusted: sizes are bounded, and nothing is unpickled but tensors.
"""

import base64
import gzip
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.bounds import check_range
from semmoe.checkpoint.engine_files import decoder_layers
from semmoe.core import DECODE, PREFILL, Placement, Plan
from semmoe.files import MOST_JSON_BYTES, load_arrays, load_json, read_limited
from semmoe.methods import eplb
from semmoe.placement.problem import placement_alone
from semmoe.topology import Fingerprint, Topology
from semmoe.trace import TraceHeader

MOST_TENSOR_BYTES = 1 << 33
MAP, COUNTS, PASSES, ANSWERS = "map", "counts", "passes", "answers"
EXTEND = 1  # SGLang's ForwardMode of prompts
FIELDS = {"forward_mode", "input_ids", "positions", "extend_seq_lens", "topk_ids_of_layer"}
_decoder_layers = lru_cache(maxsize=1)(decoder_layers)  # asked for with every record and answer of one file
SGLANG_TOP_K = 8  # ids of a token in SGLang's detailed records, whatever the model's


@dataclass(frozen=True)
class Found:
    """What a file holds: a map or counts (layers, experts), or the records of passes."""

    kind: str
    array: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    records: tuple[dict[str, Any], ...] = ()
    fingerprint: Fingerprint | None = None  # of the model, where the file says


@dataclass(frozen=True, kw_only=True)
class Request:
    """The routing of a request: prompt (M,), routed tokens (T,), their experts (T, L, K) and phase (T,)."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    expert_ids: np.ndarray
    phase: np.ndarray


def read_engine_file(path: Path) -> Found:
    """Read a file by its ending and by what it holds. Raises ValueError that names it if it is none of the above."""
    if path.is_dir():
        header = load_json(path / "counts.json", TraceHeader)
        counts = load_arrays(path / "counts.safetensors", {"activations", "transitions", "tokens"})
        return Found(COUNTS, counts["activations"], fingerprint=header.fingerprint)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if ".jsonl" in path.suffixes:
        return Found(ANSWERS)
    readers = {".json": _read_json, ".npy": _read_npy, ".pt": _read_pt}
    if path.suffix not in readers:
        raise ValueError(f"{path} must be .json, .jsonl, .npy, .pt or what `semmoe record start --counts-only` left")
    return _found(readers[path.suffix](path), path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_limited(path, MOST_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def _read_npy(path: Path) -> Any:
    _check_size(path)
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no array ({error})") from None


def _read_pt(path: Path) -> Any:
    import torch

    _check_size(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} holds something else than tensors ({str(error).splitlines()[0]})") from None


def _check_size(path: Path) -> None:
    if path.stat().st_size > MOST_TENSOR_BYTES:
        raise ValueError(f"{path} has more than {MOST_TENSOR_BYTES:,} bytes")


def _found(content: Any, path: Path) -> Found:
    """The meaning of a file's content."""
    if isinstance(content, dict) and "records" in content:
        return _passes(content, path)
    if isinstance(content, dict) and "logical_count" in content:
        counts = _numbers(content["logical_count"], path)
        return Found(COUNTS, counts.reshape(-1, *counts.shape[-2:]).sum(axis=0))  # of all steps
    if isinstance(content, dict) and "physical_to_logical_map" not in content:
        raise ValueError(f"{path} has neither physical_to_logical_map, logical_count nor records")
    numbers = _numbers(content["physical_to_logical_map"] if isinstance(content, dict) else content, path)
    return Found(MAP, np.atleast_2d(numbers))


def _numbers(values: Any, path: Path) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.zeros(0, object)  # rows of different lengths
    if array.ndim not in (1, 2, 3) or array.dtype.kind not in "iuf" or not array.size:
        raise ValueError(f"{path}: expected a row of numbers for each layer, all equally long")
    return array.astype(np.int64)


def _passes(content: dict[str, Any], path: Path) -> Found:
    """Records of passes, with physical experts turned into logical ones."""
    logical, records = _numbers(content.get("last_physical_to_logical_map", []), path), []
    for record in content["records"]:
        if not isinstance(record, dict) or not record.keys() >= FIELDS:
            raise ValueError(f"{path}: a record lacks one of {', '.join(sorted(FIELDS))}")
        if not len(record["input_ids"]):
            continue  # a rank of attention-DP that had no request in this pass
        ids = _numbers(record["topk_ids_of_layer"], path)  # (layers, tokens, 8), -1 where a token has fewer
        flat = np.clip(ids, 0, None).reshape(len(ids), -1)
        check_range("physical expert", flat, logical.shape[1], "physical experts")
        known = np.take_along_axis(logical, flat, axis=1).reshape(ids.shape)
        records.append({**record, "topk_ids_of_layer": np.where(ids < 0, -1, known)})
    return Found(PASSES, records=tuple(records))


def moe_rows(array: np.ndarray, model: Path, fingerprint: Fingerprint) -> np.ndarray:
    """The rows of MoE layers, where an engine writes one for each decoder layer; one row stands for all layers."""
    layers = fingerprint.num_layers
    if len(array) == 1:
        return np.repeat(array, layers, axis=0)
    if len(array) == layers:
        return array
    indices, depth = _decoder_layers(model)
    if len(array) != depth:
        raise ValueError(f"{len(array)} layers, but the model has {depth}, of which {layers} have experts")
    return array[indices]


def plan_of(found: Found, model: Path, fingerprint: Fingerprint, topology: Topology, redundant: int) -> Plan:
    """The plan that a map is, or that EPLB makes of counts with `redundant` experts; it schedules nothing."""
    array = moe_rows(found.array, model, fingerprint)
    if found.kind == MAP:
        maps, experts = array.astype(np.int32), fingerprint.num_experts
        placement, method = Placement(physical_to_logical_map=maps, num_experts=experts, ep_size=topology.ep_size), MAP
    else:
        if array.shape[1] != fingerprint.num_experts:
            raise ValueError(f"counts of {array.shape[1]} experts, but the model has {fingerprint.num_experts}")
        groups = fingerprint.num_groups, topology.num_nodes
        placement, method = eplb.place(array.astype(np.float64), topology.ep_size, redundant, *groups), "eplb"
    made = placement_alone(placement, topology)
    return Plan(
        topology=topology,
        placement=placement,
        tokens=made.tokens,
        requests=made.requests,
        fingerprint=fingerprint,
        method=method,
        settings={"method": method, "redundant_experts": placement.redundant_experts},
    )


def prompts_of_passes(found: Found, model: Path, fingerprint: Fingerprint) -> tuple[list[Request], int]:
    """The first chunk of each prompt in the records of SGLang, and how many tokens are left out."""
    if fingerprint.top_k > SGLANG_TOP_K:
        raise ValueError(f"SGLang's records keep {SGLANG_TOP_K} experts of a token, and the model {fingerprint.top_k}")
    out, tokens = [], 0
    for record in found.records:
        ids = np.array(record["input_ids"], np.int64)
        tokens += len(ids)
        if record["forward_mode"] != EXTEND:
            continue
        experts = moe_rows(record["topk_ids_of_layer"], model, fingerprint)[..., : fingerprint.top_k].swapaxes(0, 1)
        ends = np.cumsum(record["extend_seq_lens"])
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            # With attention-TP and an all-to-all each rank routes a part of the tokens, and the others have no ids.
            if record["positions"][begin] == 0 and (experts[begin:end] >= 0).all():
                own = ids[begin:end]
                out.append(_request(own, own, experts[begin:end], fingerprint))
    return out, tokens - sum(len(request.token_ids) for request in out)


def _request(prompt: np.ndarray, tokens: np.ndarray, experts: np.ndarray, fingerprint: Fingerprint) -> Request:
    """A request whose first tokens are its prompt. Raises ValueError for ids that the model does not have."""
    check_range("token id", tokens, fingerprint.vocab_size, "vocabulary entries")
    check_range("expert id", experts, fingerprint.num_experts, "experts")
    phase = np.where(np.arange(len(tokens)) < len(prompt), PREFILL, DECODE)
    return Request(prompt_ids=prompt, token_ids=tokens, expert_ids=experts, phase=phase)


def requests_of_answers(path: Path, model: Path, fingerprint: Fingerprint) -> Iterator[Request]:
    """The requests of vLLM's answers, one for each choice. Raises ValueError that names the line."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_JSON_BYTES):
            number += 1
            try:
                answer = json.loads(line) if line.strip() else {"choices": []}
                for choice in answer["choices"]:
                    yield _of_choice(choice, answer, model, fingerprint)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"{path}, line {number}: no answer of vLLM with routed experts: {reason}") from None


def _of_choice(choice: Any, answer: Any, model: Path, fingerprint: Fingerprint) -> Request:
    """vLLM routes all tokens but the last that was sampled, and says so for every decoder layer."""
    if not choice.get("routed_experts") or not choice.get("token_ids"):
        raise ValueError("give the server --enable-return-routed-experts, and requests return_token_ids")
    prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True)), allow_pickle=False)
    tokens = np.array([*prompt, *choice["token_ids"]], np.int64)[:-1]
    if experts.ndim != 3 or len(experts) != len(tokens) or experts.shape[2] != fingerprint.top_k:
        expected = f"({len(tokens)}, layers, {fingerprint.top_k})"
        raise ValueError(f"routed_experts has shape {experts.shape}, not {expected}")
    by_layer = moe_rows(experts.swapaxes(0, 1).astype(np.int64), model, fingerprint)
    return _request(np.array(prompt), tokens, by_layer.swapaxes(0, 1), fingerprint)
