"""The endpoint of vLLM's API server by which `semmoe swap` reaches the workers.

    POST /v1/semmoe/swap  {"number": 123, "layers_per_pass": 0}  ->  the state of rank 0's swap when it has ended

Between two steps the engine serves. For each step it is paused with its requests and their caches kept: vLLM's data
parallel ranks then agree to run no pass, so that all are between the same two. vLLM checks API keys below /v1.
"""

import asyncio
from argparse import Namespace
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from semmoe.engines import supervisor
from semmoe.engines.settings import control_folder
from semmoe.engines.vllm.targets import ARM, PREPARE, READY, STATE, STEP
from semmoe.io.bounds import MOST_LAYERS
from semmoe.live.status import ENDED, MOST_NUMBER, staged

PATH = "/v1/semmoe/swap"
LOOK = 0.5  # seconds between two looks at whether the engine still runs
POLL = 0.02  # seconds between two looks at whether workers are ready, and between two steps


class Order(BaseModel):
    """A client's order to swap the plan."""

    model_config = ConfigDict(extra="forbid", strict=True)
    number: int = Field(gt=0, le=MOST_NUMBER)
    layers_per_pass: int = Field(default=0, ge=0, le=MOST_LAYERS)


class SwapEndpoint:
    """An entry of `vllm.endpoint_plugins`."""

    name = "semmoe"
    required_tasks = None

    def __init__(self) -> None:
        self._client: Any = None
        self._running: asyncio.Task[dict[str, Any]] | None = None

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()
        router.add_api_route(PATH, self.swap, methods=["POST"])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self._client = engine_client

    async def swap(self, order: Order) -> dict[str, Any]:
        """Swap, even if the client that asked does not wait for the end."""
        if self._client is None or control_folder() is None:
            raise HTTPException(409, "this server was not started by `semmoe serve`")
        if self._running is not None and not self._running.done():
            raise HTTPException(409, "another swap is not over")
        self._running = asyncio.create_task(self._swap(order))
        return await asyncio.shield(self._running)

    async def _swap(self, order: Order) -> dict[str, Any]:
        refusals = await self._ask(ARM, order.number, order.layers_per_pass)
        if any(refusals):
            raise HTTPException(409, next(filter(None, refusals)))
        status = (await self._ask(STATE))[0]
        while status["state"] not in ENDED:
            await asyncio.sleep(POLL)
            # Data-parallel ranks agree to pause every --dp-sync-interval passes, and serve no request until they have.
            if status["state"] != "preparing" or all(await self._ask(READY)):
                status = await self._step()
        if status["state"] == "done":
            await self._schedule(order.number)
        return status

    async def _step(self) -> dict[str, Any]:
        """One step while no rank runs a pass; requests and their caches are kept as they are."""
        await self._or_end(self._client.pause_generation(mode="keep", clear_cache=False))
        try:
            return (await self._ask(STEP))[0]
        finally:
            await self._or_end(self._client.resume_generation())

    async def _ask(self, method: str, *args: int) -> list[Any]:
        """What the workers of the first engine answer; those of all run the method."""
        return await self._or_end(self._client.collective_rpc(method, args=args))

    async def _or_end(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call to the engine. It never comes if the engine ends, which would keep the server alive."""
        task = asyncio.create_task(call)
        while not (await asyncio.wait({task}, timeout=LOOK))[0]:
            if self._client.errored:
                task.cancel()
                folder = control_folder()
                why = supervisor.reported(folder) if folder is not None else None
                raise HTTPException(500, f"the server has ended{': ' + why if why else ''}")
        return task.result()

    async def _schedule(self, number: int) -> None:
        """Requests follow at last, when experts are where the new plan has them."""
        prepare, folder = getattr(self._client.engine_core, PREPARE, None), control_folder()
        if prepare is not None and folder is not None:
            plan = await asyncio.to_thread(staged, folder, number)
            await asyncio.to_thread(prepare, plan)
