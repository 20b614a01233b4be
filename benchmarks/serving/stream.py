"""Clients that stream without a pause, and a swap beneath them: when every token came.

    python stream.py < JOB > FIGURES

One process on node 0, started for each window; it has loaded all that a swap needs before the first request. JOB is a
JSON object: url, model, prompts (lists of token ids, taken in turn), clients, seconds, output_tokens, and `plan`,
`folder` (of the server), `layers` and `at` (seconds from the start) of a swap, or an empty `plan`. FIGURES: for each
request when it was sent and when each of its tokens came, in seconds from the start; of the swap its status, when it
was asked for and when it had ended.
"""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from load import stream

from semmoe.core import Plan
from semmoe.live.client import Served
from semmoe.plan import load_plan
from semmoe.settings import SwapSettings


async def swap(job: dict[str, Any], plan: Plan, start: float) -> dict[str, Any]:
    await asyncio.sleep(job["at"])
    asked, settings = time.perf_counter() - start, SwapSettings(layers_per_pass=job["layers"])
    status = await asyncio.to_thread(Served(job["url"], Path(job["folder"])).swap, plan, settings)
    return {"asked": asked, "ended": time.perf_counter() - start, "status": status.model_dump()}


async def run(job: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    prompts, found = itertools.cycle(job["prompts"]), []
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - start < job["seconds"]:
                times = await stream(session, job, next(prompts))
                found.append([round(at - start, 5) for at in times])

        swapping = asyncio.create_task(swap(job, plan, start)) if plan is not None else None
        await asyncio.gather(*(client() for _ in range(job["clients"])))
        return {"requests": found, "swap": await swapping if swapping else {}}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(asyncio.run(run(given, load_plan(given["plan"]) if given["plan"] else None)), sys.stdout)
