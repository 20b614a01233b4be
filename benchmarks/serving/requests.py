"""Requests of the soak: good ones, clients that hang up, and malformed ones; and what became of each."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.model import load_model
from serving.engine import Engine

NEW_TOKENS = range(4, 9)
PROMPT_TOKENS = range(8, 49)
MARGIN = 1e-4  # of the arg-max, under which the reference cannot tell which token is right
HANG_UPS = ("hangs up at once", "hangs up after the first token")
MALFORMED = ("bad JSON", "empty prompt", "wrong rank", "id out of vocabulary")
RIGHT, NEAR_TIE, WRONG, HUNG_UP, LOST = "right", "near-tie", "WRONG", "hung up", "LOST"
ACCEPTED = "accepted"  # a malformed request, which was answered all the same


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A prompt, and what plain transformers makes of it."""

    prompt: list[int]
    tokens: list[int]  # as many as any request asks for
    margins: list[float]  # of the arg-max, by token

    def judge(self, found: list[int], wanted: int) -> str:
        if found == self.tokens[:wanted]:
            return RIGHT
        pairs = zip(found, self.tokens, strict=False)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return NEAR_TIE if differs is not None and self.margins[differs] < MARGIN else WRONG


@dataclass(frozen=True, kw_only=True)
class Request:
    engine: Engine
    kind: str  # "good", or of HANG_UPS or MALFORMED
    native: bool  # SGLang's /generate, else /v1/completions
    stream: bool
    new_tokens: int
    reference: Reference
    delay: float  # seconds until who hangs up at once does

    @property
    def path(self) -> str:
        return "/generate" if self.native else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        more = self.engine.WRONG_RANK_HEADERS if self.kind == "wrong rank" else {}
        return {"Content-Type": "application/json"} | more

    def body(self) -> bytes:
        prompt = self.reference.prompt
        if self.kind == "bad JSON":
            return b'{"input_ids": [1, 2, '
        if self.kind == "id out of vocabulary":
            prompt = [*prompt, 1_000_000]
        if self.kind == "empty prompt":
            prompt = []
        rank = self.engine.WRONG_RANK if self.kind == "wrong rank" else {}
        return json.dumps((self._native(prompt) if self.native else self._openai(prompt)) | rank).encode()

    def _native(self, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": self.stream}

    def _openai(self, prompt: list[int]) -> dict[str, Any]:
        return {"model": str(MODEL), "prompt": prompt, "max_tokens": self.new_tokens, "temperature": 0,
                "ignore_eos": True, "stream": self.stream, "return_token_ids": True}  # fmt: skip


@torch.no_grad()
def make_references(held_out: list[list[int]], count: int, rng: random.Random) -> list[Reference]:
    """Of `count` prompts, pieces of held-out text; those that differ have no end-of-text token in their answers."""
    model, out, most = load_model(str(MODEL)), [], max(NEW_TOKENS)
    for ids in held_out:
        length = rng.choice(PROMPT_TOKENS)
        start = rng.randrange(len(ids) - length)
        prompt = ids[start : start + length]
        made = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.long),
                              do_sample=False, max_new_tokens=most, pad_token_id=0, output_logits=True,
                              return_dict_in_generate=True)  # fmt: skip
        tokens = made.sequences[0, length:].tolist()
        top = torch.cat(made.logits).float().topk(2).values
        if len(tokens) == most and tokens[-1] != 0:
            out.append(Reference(prompt=prompt, tokens=tokens, margins=(top[:, 0] - top[:, 1]).tolist()))
        if len(out) == count:
            return out
    raise ValueError(f"the held-out text makes {len(out)} prompts, not {count}")


def make_requests(
    engine: Engine, references: list[Reference], count: int, hang_ups: float, malformed: float, seed: int
) -> list[Request]:
    """hang_ups, malformed: shares of the requests."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        drawn = rng.random()
        kinds = HANG_UPS if drawn < hang_ups else MALFORMED if drawn < hang_ups + malformed else ["good"]
        kind = rng.choice(kinds)
        native = rng.random() < 0.5 and engine.NATIVE
        out.append(Request(engine=engine, kind=kind, native=native, new_tokens=rng.choice(NEW_TOKENS),
                           stream=kind == HANG_UPS[1] or rng.random() < 0.5, reference=rng.choice(references),
                           delay=rng.uniform(0, 2)))  # fmt: skip
    return out


async def send(session: aiohttp.ClientSession, request: Request) -> str:
    """What became of it: RIGHT, NEAR_TIE, WRONG, HUNG_UP, ACCEPTED, `HTTP <code>`, or LOST and why."""
    try:
        if request.kind == HANG_UPS[0]:
            return await asyncio.wait_for(_exchange(session, request), request.delay)
        return await _exchange(session, request)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError) as error:
        hung_up = request.kind == HANG_UPS[0] and isinstance(error, asyncio.TimeoutError)
        return HUNG_UP if hung_up else f"{LOST}: {type(error).__name__}"


async def _exchange(session: aiohttp.ClientSession, request: Request) -> str:
    async with session.post(request.path, data=request.body(), headers=request.headers) as response:
        if response.status != 200:
            await response.read()
            return f"HTTP {response.status}"
        if request.stream:
            found = await _streamed(response, request)
        else:
            found = _tokens(await response.json(), request.native)
    if isinstance(found, str):
        return found
    return ACCEPTED if request.kind in MALFORMED else request.reference.judge(found, request.new_tokens)


async def _streamed(response: aiohttp.ClientResponse, request: Request) -> list[int] | str:
    """All tokens, or what happened before they were there."""
    found: list[int] = []
    async for event in _events(response):
        if "error" in event:
            return f"HTTP 200, then error {event['error'].get('code')}"
        tokens = _tokens(event, request.native)
        found = tokens if request.native else found + tokens  # all so far, or the next ones
        if request.kind == HANG_UPS[1] and found:
            response.close()
            return HUNG_UP
    return found


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield json.loads(data)


def _tokens(answer: dict[str, Any], native: bool) -> list[int]:
    return answer["output_ids"] if native else (answer["choices"][0].get("token_ids") or [])
