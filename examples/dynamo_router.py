"""A component of NVIDIA Dynamo that names the data-parallel rank of each request, by a plan and by load.

    python examples/dynamo_router.py PLAN ENGINES OWN    # endpoints, as dynamo.backend.generate dynamo.semmoe.generate

It stands between Dynamo's frontend and engines: a request, a dictionary with `token_ids`, comes in at the endpoint OWN
and goes to ENGINES with `routing.dp_rank` set, which Dynamo's workers of vLLM, SGLang and TensorRT-LLM honour; their
answers go back as they come. A request that names a rank keeps it. Needs `pip install ai-dynamo-runtime semmoe`;
discovery and transport are chosen as for any component of Dynamo, by its environment variables.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.runtime import DistributedRuntime, dynamo_worker

from semmoe.gateway import Ranks
from semmoe.plan import load_plan


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    plan, engines, own = sys.argv[1:]
    loaded, client = load_plan(plan), await runtime.endpoint(engines).client()
    ranks, usable = Ranks(loaded), range(loaded.topology.dp_size)

    async def generate(request: dict[str, Any]) -> AsyncIterator[Any]:
        routing = request.get("routing") or {}
        named = routing.get("dp_rank")
        choice = ranks.admit(request["token_ids"], usable) if named is None else ranks.admit(None, [named])
        try:
            routed = {**request, "routing": {**routing, "dp_rank": choice.ranks[0]}}
            async for answer in await client.round_robin(routed):
                yield answer.data()
        finally:
            ranks.finish(choice)

    await runtime.endpoint(own).serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(main())
