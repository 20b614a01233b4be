"""The command calibrate: measure what links and experts cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import TOOLS, app
from semmoe.cli.form import takes
from semmoe.cli.options import OUTPUT, Force, Json, ModelArgument
from semmoe.settings import CalibrateSettings

if TYPE_CHECKING:
    from semmoe.engines.transformers.calibrate import Calibration


@app.command(rich_help_panel=TOOLS)
@takes(settings=CalibrateSettings)
def calibrate(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option(help="The links file, JSON, for `semmoe solve --links`.", rich_help_panel=OUTPUT)
    ],
    force: Force = False,
    name: Annotated[str, typer.Option(help="What to call these links.", rich_help_panel=OUTPUT)] = "this machine",
    as_json: Json = False,
    settings: Any = None,
) -> None:
    """Measure what links and experts cost, with real collectives between local processes and the model's own experts.

    Run it on an idle machine. At the end a layer that was not part of the fit is predicted and measured.

    Example: `semmoe calibrate MODEL --ep-size 4 --out links.json`
    """
    from semmoe.engines.transformers.calibrate import TOKENS
    from semmoe.engines.transformers.calibrate import calibrate as measure
    from semmoe.files import check_output, save_json

    ep_size = settings().ep_size
    check_output(out, force=force)
    with console.bars() as bars:
        found = measure(model, ep_size, bars.task(f"measuring {ep_size} processes", len(TOKENS)), name)
    save_json(out, found.links)
    if found.doubtful:
        console.err.print(
            f"[yellow]warning:[/] the prediction of a layer that was not part of the fit is {found.error:+.0%} off "
            "the measurement: run this again on an idle machine before you rely on verdicts with these links",
            soft_wrap=True,
            highlight=False,
        )
    if as_json:
        result = {
            "out": str(out),
            "predicted_us": found.predicted * 1e6,
            "measured_us": found.measured * 1e6,
            "error": found.error,
            "doubtful": found.doubtful,
        }
        console.print_json({**result, "links": found.links.model_dump()})
    else:
        _print_links(out, found)


def _print_links(out: Path, found: "Calibration") -> None:
    tier, experts = found.links.inside_node, found.links.experts
    rows = [
        ["dispatch", f"{tier.dispatch_latency_us:,.0f} us", f"{tier.gigabytes_per_second:.3g} GB/s"],
        ["combine", f"{tier.combine_latency_us:,.0f} us", f"{tier.gigabytes_per_second:.3g} GB/s"],
        ["all-reduce", f"{tier.all_reduce_latency_us:,.0f} us", f"{tier.all_reduce_gigabytes_per_second:.3g} GB/s"],
        ["experts of a rank", f"{experts.fixed_us:,.0f} us", f"{experts.teraflops:.3g} Tflop/s"],
    ]
    console.print_table(f"{out}: {found.links.name}", ["", "fixed", "speed"], rows)
    predicted, measured = found.predicted * 1e6, found.measured * 1e6
    console.out.print(
        f"a layer of its own: predicted {predicted:,.0f} us, measured {measured:,.0f} us ({found.error:+.0%})"
    )
