"""The command picker: an endpoint picker for Envoy and the inference gateways that are built on it."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from semmoe.cli import options
from semmoe.cli.app import SERVING, command
from semmoe.core import Plan
from semmoe.io import console

FINISH_SECONDS = 30  # for open streams after a signal to end
SERVICES = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


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
    import grpc  # noqa: F401  # report a missing extra before anything else

    from semmoe.gateway.picker import Picker
    from semmoe.gateway.prompts import Tokenizer
    from semmoe.gateway.scorer import Ranks
    from semmoe.plan import load_plan

    logging.basicConfig(format="%(message)s")
    loaded = load_plan(plan)
    ranks, number = Ranks(loaded), loaded.topology.dp_size
    found = addresses_of(addresses, number)
    chosen = Picker(ranks, Tokenizer(_tokenizer_of(tokenizer, loaded)), found)
    if not _is_loopback(host):
        console.warn(f"{host} is open to others, and the picker has no authentication")
    each = "a port for each" if len(addresses) > 1 else f"by header, at {addresses[0]}"
    asyncio.run(_serve(chosen, host, port, f"{number} ranks ({each}; plan of {loaded.method})"))


def addresses_of(given: Sequence[str], num_ranks: int) -> list[str]:
    """Return the address of each rank, with its host as a number, which gateways compare. Raises ValueError."""
    found = [_resolved(address) for address in given]
    if len(set(found)) != len(found):
        raise ValueError(f"an address is given twice: {', '.join(given)}")
    if len(found) not in (1, num_ranks):
        words = f"the plan has {num_ranks} data-parallel ranks, and {len(found)} addresses came"
        raise ValueError(f"{words}: give one for each, or a single server")
    return found * num_ranks if len(found) == 1 else found


def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise ValueError(f"{address!r} is not an address: give HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host of {address} is not known: {error.strerror or error}") from None
    return _shown(str(min(found)[4][0]), int(port))  # of several, the first of IPv4


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tokenizer_of(model: str, plan: Plan) -> Any:
    from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash

    found = load_tokenizer(model)
    if tokenizer_hash(found) != plan.fingerprint.tokenizer_hash:
        raise ValueError(f"this plan was made for another tokenizer than that of {model}")
    return found


async def _serve(chosen: Any, host: str, port: int, ranks: str) -> None:
    """Listen and answer until a signal comes. Raises ValueError if it cannot listen."""
    import grpc
    from envoy.service.ext_proc.v3.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_health.v1.health import aio as health

    server, alive = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), health.HealthServicer()
    add_ExternalProcessorServicer_to_server(chosen, server)
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    for service in SERVICES:
        await alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    try:
        port = server.add_insecure_port(_shown(host, port))
    except RuntimeError:
        raise ValueError(f"cannot listen on {_shown(host, port)}: give another --host or --port") from None
    await server.start()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: asyncio.ensure_future(server.stop(FINISH_SECONDS))
    )
    console.say(f"{_shown(host, port)} picks among {ranks}")
    await server.wait_for_termination()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
