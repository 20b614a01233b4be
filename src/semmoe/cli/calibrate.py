"""The command calibrate: measure what links and experts cost."""

import os
from pathlib import Path
from typing import Annotated

import typer

from semmoe.cli import options
from semmoe.cli.app import TOOLS, command, refuse_given
from semmoe.costs.links import Links
from semmoe.io import console
from semmoe.io.files import check_output, save_json
from semmoe.settings import CalibrateSettings


@command(TOOLS)
def calibrate(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    out: Annotated[Path, options.output("The links file, JSON, for `semmoe solve --links`.")],
    force: options.Force = False,
    name: Annotated[str, options.output("What to call these links.")] = "this machine",
    as_json: options.Json = False,
    settings: CalibrateSettings,
) -> None:
    """Measure what links and experts cost, with real all-to-alls and the model's own experts.

    Run it on an idle machine.

    Examples: `semmoe calibrate MODEL --ep-size 4 --out links.json` measures local processes, and on every node
    `torchrun --nnodes 2 --nproc-per-node 8 ... --no-python semmoe calibrate MODEL --out links.json` also measures links
    between nodes; rank 0 writes the file
    """
    from semmoe.engines.transformers import calibrate as measuring
    from semmoe.engines.transformers.config import fingerprint_of

    fingerprint_of(model)  # refuses a model before ranks start
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    if launched:
        refuse_given(ctx, ["ep_size"], "torchrun decides the ranks")
    if not launched or os.environ["RANK"] == "0":
        check_output(out, force=force, inputs=(model,))
    ranks = settings.ep_size
    links = measuring.calibrate_launched(model, name) if launched else measuring.calibrate(model, ranks, name)
    if links is None:  # another rank of torchrun's has the result
        return
    save_json(out, links)
    title = f"{out}: {links.name}"
    result = {"out": str(out), "links": links.model_dump()}
    console.tell(as_json, result, lambda: console.print_table(title, ["", "latency", "speed"], _speeds(links)))


def _speeds(links: Links) -> list[list[str]]:
    """Rows of what, latency and speed."""
    rows = []
    for where, tier in (("inside nodes", links.inside_node), ("between nodes", links.between_nodes)):
        if tier is not None:
            speed = f"{tier.gigabytes_per_second:.3g} GB/s"
            rows.append([f"all-to-all {where}", f"{tier.dispatch_latency_us:,.0f} us", speed])
    return [*rows, ["experts of a rank", "", f"{links.experts.teraflops:.3g} Tflop/s"]]
