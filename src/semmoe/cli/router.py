"""`semmoe router`: requests to the ranks of engines in which nothing is installed."""

import ipaddress
import logging
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from semmoe import console
from semmoe.cli.app import app
from semmoe.cli.options import INPUT, METHOD, OUTPUT, model_path, numeric
from semmoe.core import Plan
from semmoe.router.settings import RouterSettings

LIMITS = "Limits"
DEFAULT = RouterSettings(backends=("http://127.0.0.1",))


class Ranks(str, Enum):
    header = "header"
    urls = "urls"


@app.command()
def router(
    backends: Annotated[
        list[str], typer.Argument(help="Where engines listen, as http://HOST:PORT.", show_default=False)
    ],
    plan: Annotated[Path, typer.Option(help="The plan directory, for attention dp or hybrid.", rich_help_panel=INPUT)],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The model's directory, or one with its tokenizer; without it only prompts sent as ids are scheduled.",
            rich_help_panel=INPUT,
            show_default=False,
            callback=model_path,
        ),
    ] = None,
    backend_ranks: Annotated[
        Ranks,
        typer.Option(
            help="header: every backend has all ranks and is told one; urls: the backends are the ranks, in order.",
            rich_help_panel=METHOD,
        ),
    ] = Ranks.header,
    prefix_weight: Annotated[
        float, numeric(RouterSettings, "prefix_weight", "Worth of a cached prompt, in shares of local experts.", METHOD)
    ] = DEFAULT.prefix_weight,
    cache_tokens: Annotated[
        int, numeric(RouterSettings, "cache_tokens", "Prompt tokens that a rank's prefix cache holds.", METHOD)
    ] = DEFAULT.cache_tokens,
    max_in_flight: Annotated[
        int, numeric(RouterSettings, "max_in_flight", "Most requests at the backends.", LIMITS)
    ] = DEFAULT.max_in_flight,
    queue: Annotated[int, numeric(RouterSettings, "queue", "Most further ones that wait.", LIMITS)] = DEFAULT.queue,
    queue_seconds: Annotated[
        float, numeric(RouterSettings, "queue_seconds", "Longest wait; then 503.", LIMITS)
    ] = DEFAULT.queue_seconds,
    max_body_mb: Annotated[
        int, numeric(RouterSettings, "max_body", "Longest body of a request; then 413.", LIMITS, unit=1 << 20)
    ] = DEFAULT.max_body >> 20,
    max_held_mb: Annotated[
        int, numeric(RouterSettings, "max_held", "Most of all bodies together; then 503.", LIMITS, unit=1 << 20)
    ] = DEFAULT.max_held >> 20,
    body_seconds: Annotated[
        float, numeric(RouterSettings, "body_seconds", "Longest time for a client to send a body; then 408.", LIMITS)
    ] = DEFAULT.body_seconds,
    stall_seconds: Annotated[
        float, numeric(RouterSettings, "stall_seconds", "Longest time without a byte of a body; then 408.", LIMITS)
    ] = DEFAULT.stall_seconds,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=OUTPUT)] = "127.0.0.1",
    port: Annotated[int, numeric(RouterSettings, "port", "Port to listen on; 0: any.", OUTPUT)] = DEFAULT.port,
) -> None:
    """Send requests to the data-parallel ranks of vLLM or SGLang by a plan, without a plug-in in the engine.

    Completions, chats, responses and /generate are scheduled by the plan, by running load and by what ranks have
    cached; anything else is passed through. Own pages: /router/health, /router/ready, /metrics.

    Example: `semmoe router http://127.0.0.1:8000 --plan plan --tokenizer MODEL`, then point clients at port 8080
    """
    import uvicorn  # noqa: F401  # a missing extra is told before anything else

    from semmoe.plan import load_plan
    from semmoe.router import server

    settings = RouterSettings(
        backends=tuple(url.rstrip("/") for url in backends),
        backend_ranks=backend_ranks.value,
        prefix_weight=prefix_weight,
        cache_tokens=cache_tokens,
        max_in_flight=max_in_flight,
        queue=queue,
        queue_seconds=queue_seconds,
        max_body=max_body_mb << 20,
        max_held=max_held_mb << 20,
        body_seconds=body_seconds,
        stall_seconds=stall_seconds,
    )
    logging.basicConfig(format="%(message)s")
    logging.getLogger("semmoe").setLevel(logging.INFO)
    loaded = load_plan(plan)
    application = server.build(settings, loaded, tokenizer)
    listener = server.listen(host, port)
    _announce(settings, loaded, host, listener.getsockname()[1], tokenizer is not None)
    server.run(application, listener, settings)


def _announce(settings: RouterSettings, plan: Plan, host: str, port: int, tokenizes: bool) -> None:
    """Where it listens and what it does; a warning for what a user may not expect."""
    shown, urls = f"[{host}]" if ":" in host else host, ", ".join(settings.backends)
    ranks = "one rank each" if settings.backend_ranks == "urls" else f"{plan.topology.dp_size} ranks each, by header"
    console.out.print(f"http://{shown}:{port} -> {urls} ({ranks}; plan of {plan.method})", markup=False)
    if not _is_loopback(host):
        console.err.print(f"[yellow]warning:[/] {host} is open to others, and the router asks nobody who they are")
    if not tokenizes:
        console.err.print("[yellow]warning:[/] without --tokenizer only prompts sent as ids are scheduled")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
