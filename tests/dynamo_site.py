"""The other processes around examples/dynamo_router.py: an engine that says what it was asked, and a client.

python tests/dynamo_site.py engine ENDPOINT          # answers as many times as a prompt has tokens
python tests/dynamo_site.py client ENDPOINT          # sends the requests of a JSON list on its input, prints answers
"""

import asyncio
import json
import sys

from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint(sys.argv[2])

    async def generate(request):
        for token in request["token_ids"]:
            yield {"token_ids": [token], "rank": request["routing"]["dp_rank"], "model": request["model"]}

    if sys.argv[1] == "engine":
        await endpoint.serve_endpoint(generate)
        return
    client = await endpoint.client()
    await client.wait_for_instances()
    for request in json.load(sys.stdin):
        answers = [answer.data() async for answer in await client.round_robin(request)]
        print(json.dumps(answers), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
