"""The command router: schedule requests to the ranks of engines without a plug-in in them."""

import ipaddress
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.options import INPUT, OUTPUT, model_path
from semmoe.core import Plan
from semmoe.router.settings import RouterSettings


@app.command(rich_help_panel=SERVING)
@takes(settings=RouterSettings)
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
    settings: Any = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=OUTPUT)] = "127.0.0.1",
) -> None:
    """Send requests to the data-parallel ranks of vLLM or SGLang by a plan, without a plug-in in the engine.

    Completions, chats, responses and /generate are scheduled by the plan, by running load and by what ranks have
    cached; anything else is passed through. Own pages: /router/health, /router/ready, /metrics.

    Example: `semmoe router http://127.0.0.1:8000 --plan plan --tokenizer MODEL`, then point clients at port 8080
    """
    import uvicorn  # noqa: F401  # report a missing extra before anything else

    from semmoe.plan import load_plan
    from semmoe.router import server

    chosen = settings(backends=tuple(url.rstrip("/") for url in backends))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("semmoe").setLevel(logging.INFO)
    loaded = load_plan(plan)
    application = server.build(chosen, loaded, tokenizer)
    listener = server.listen(host, chosen.port)
    _announce(chosen, loaded, host, listener.getsockname()[1], tokenizer is not None)
    server.run(application, listener, chosen)


def _announce(settings: RouterSettings, plan: Plan, host: str, port: int, tokenizes: bool) -> None:
    """Print where the router listens and what it does, and warn of what a user may not expect."""
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
