"""The command picker: an endpoint picker for Envoy and the inference gateways that are built on it."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

from semmoe.cli import options
from semmoe.cli.app import SERVING, command
from semmoe.core import Plan
from semmoe.io import console


@command(SERVING)
def picker(
    addresses: Annotated[list[str], options.argument("HOST:PORT of every rank in order, or of a server of all ranks.")],
    plan: Annotated[Path, options.inputs("The plan directory, for attention dp or hybrid.")],
    tokenizer: Annotated[
        str, options.inputs("The model's directory, or one with its tokenizer.", callback=options.model_path)
    ],
    host: Annotated[str, options.output("Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, options.output("Port to listen on; 0: any.", min=0, max=65_535)] = 9002,
) -> None:
    """Tell Envoy, by its external processing, which data-parallel rank serves each request.

    Prompts of completions, chats, responses and Anthropic's messages go by the plan and by load; all else by load. Each
    rank has its own port, or the header X-data-parallel-rank names it to the one server. `deploy/envoy.yaml` is a
    configuration of Envoy for both cases.

    Example: `semmoe picker 127.0.0.1:8000 127.0.0.1:8001 --plan plan --tokenizer MODEL`, a port per rank

    Example: `semmoe picker 127.0.0.1:30000 --plan plan --tokenizer MODEL`, one server
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no model is run here, so torch is not needed
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines on a port in use would precede ours
    import asyncio  # slow to import, so that `--help` of all commands does without

    import grpc  # noqa: F401  # report a missing extra before anything else

    from semmoe.gateway.addresses import addresses_of, is_loopback
    from semmoe.gateway.picker import Picker, serve
    from semmoe.gateway.prompts import Tokenizer
    from semmoe.gateway.scorer import Ranks
    from semmoe.plan import load_plan

    logging.basicConfig(format="%(message)s")
    loaded = load_plan(plan)
    ranks, number = Ranks(loaded), loaded.topology.dp_size
    found = addresses_of(addresses, number)
    chosen = Picker(ranks, Tokenizer(_tokenizer_of(tokenizer, loaded)), found)
    if not is_loopback(host):
        console.warn(f"{host} is open to others, and the picker has no authentication")
    each = "a port for each" if len(addresses) > 1 else f"by header, at {addresses[0]}"
    words = f"picks among {number} ranks ({each}; plan of {loaded.method})"
    asyncio.run(serve(chosen, host, port, lambda address: console.say(f"{address} {words}")))


def _tokenizer_of(model: str, plan: Plan) -> Any:
    from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash

    found = load_tokenizer(model)
    if tokenizer_hash(found) != plan.fingerprint.tokenizer_hash:
        raise ValueError(f"this plan was made for another tokenizer than that of {model}")
    return found
