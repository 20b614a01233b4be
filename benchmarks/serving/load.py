"""The benchmarks' load: requests at given times to an OpenAI server, and when each got its first token and its last.

    python load.py < JOB > FIGURES

One process on node 0, started for each run; it imports little, since it shares the cores with the ranks. JOB is a JSON
object: url, model, prompts (lists of token ids), arrivals (seconds from the start), output_tokens. FIGURES: seconds
from the start to the last answer, and for each request its times in ms from when it was sent: first token, last token.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

DATA, DONE = b"data: ", b"[DONE]"


async def stream(session: aiohttp.ClientSession, job: dict[str, Any], prompt: list[int]) -> list[float]:
    """When a request was sent and when each of its tokens came, by the process's clock."""
    body = {"model": job["model"], "prompt": prompt, "max_tokens": job["output_tokens"], "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    times = [time.perf_counter()]
    async with session.post(job["url"] + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.strip().removeprefix(DATA)
            if data and data != DONE:
                if b'"error"' in data:
                    raise ValueError(data.decode(errors="replace"))
                times.append(time.perf_counter())
    return times


async def send(session: aiohttp.ClientSession, job: dict[str, Any], prompt: list[int], at: float) -> list[float]:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    sent, *came = await stream(session, job, prompt)
    return [round(1000 * (came[0] - sent), 2), round(1000 * (came[-1] - sent), 2)]


async def run(job: dict[str, Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close a connection that is kept
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.perf_counter()
        pairs = zip(job["prompts"], job["arrivals"], strict=True)
        found = await asyncio.gather(*(send(session, job, prompt, started + at) for prompt, at in pairs))
        return {"seconds": round(time.perf_counter() - started, 4), "requests": found}


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
