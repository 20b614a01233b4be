"""The command calibrate: measure what links and experts cost."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import TOOLS, app, refuse_given
from semmoe.cli.form import takes
from semmoe.cli.options import OUTPUT, Force, Json, ModelArgument
from semmoe.settings import CalibrateSettings

if TYPE_CHECKING:
    from semmoe.calibration import PairSpeeds
    from semmoe.engines.transformers.calibrate import Calibration


@app.command(rich_help_panel=TOOLS)
@takes(settings=CalibrateSettings)
def calibrate(
    ctx: typer.Context,
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

    Examples: `semmoe calibrate MODEL --ep-size 4 --out links.json` and, on several nodes or where links differ,
    `torchrun --nnodes 2 --nproc-per-node 8 ... --no-python semmoe calibrate MODEL --out links.json` on every node,
    which measures each pair of ranks; rank 0 writes the file
    """
    from semmoe.files import save_json

    found = _measure(ctx, model, out, force, name, settings())
    if found is None:  # another rank of torchrun's has the result
        return
    save_json(out, found.links)
    if found.doubtful:
        console.warn(
            f"the prediction of a layer that was not part of the fit is {found.error:+.0%} off the measurement: "
            "run this again on an idle machine before you rely on verdicts with these links"
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


def _measure(
    ctx: typer.Context, model: str, out: Path, force: bool, name: str, chosen: CalibrateSettings
) -> "Calibration | None":
    from semmoe.engines.transformers import calibrate as calibration
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.files import check_output

    fingerprint_of(model)  # refuses a model before ranks start
    launched = calibration.launched()
    if launched:
        refuse_given(ctx, ["ep_size", "pairs"], "torchrun decides the ranks, and every pair of them is measured")
    if not launched or os.environ["RANK"] == "0":
        check_output(out, force=force, inputs=(model,))
    with console.bars() as bars:
        words = "ranks of torchrun" if launched else f"{chosen.ep_size} processes"
        advance = bars.task(f"measuring {words}", len(calibration.TOKENS))
        if launched:
            return calibration.calibrate_launched(model, advance, name)
        return calibration.calibrate(model, chosen.ep_size, advance, name, chosen.pairs)


def _of_pairs(pairs: "PairSpeeds | None") -> list[list[str]]:
    """The slowest and the fastest pair."""
    if pairs is None:
        return []
    speeds = [
        (speed, i, j) for i, row in enumerate(pairs.gigabytes_per_second) for j, speed in enumerate(row) if i != j
    ]
    ends = (("slowest", min(speeds)), ("fastest", max(speeds)))
    return [[f"{word} pair", f"{i} to {j}", f"{speed:.3g} GB/s"] for word, (speed, i, j) in ends]


def _print_links(out: Path, found: "Calibration") -> None:
    tier, experts = found.links.inside_node, found.links.experts
    rows = [
        ["dispatch", f"{tier.dispatch_latency_us:,.0f} us", f"{tier.gigabytes_per_second:.3g} GB/s"],
        ["combine", f"{tier.combine_latency_us:,.0f} us", f"{tier.gigabytes_per_second:.3g} GB/s"],
        ["all-reduce", f"{tier.all_reduce_latency_us:,.0f} us", f"{tier.all_reduce_gigabytes_per_second:.3g} GB/s"],
        *_of_pairs(found.links.pairs),
        ["experts of a rank", f"{experts.fixed_us:,.0f} us", f"{experts.teraflops:.3g} Tflop/s"],
    ]
    console.print_table(f"{out}: {found.links.name}", ["", "fixed", "speed"], rows)
    predicted, measured = found.predicted * 1e6, found.measured * 1e6
    console.out.print(
        f"a layer of its own: predicted {predicted:,.0f} us, measured {measured:,.0f} us ({found.error:+.0%})"
    )
