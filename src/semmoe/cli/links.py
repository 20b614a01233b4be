"""Options that say which links a plan is for, and what these charge."""

from typing import Annotated

import typer

from semmoe.calibration import PhaseLinks, load_links
from semmoe.cli.app import refuse_given, was_given
from semmoe.cli.options import LINKS
from semmoe.rowcosts import RowCosts
from semmoe.settings import CoclusterSettings
from semmoe.topology import Topology

PhaseCosts = tuple[RowCosts, RowCosts]
LinksOption = Annotated[
    str | None,
    typer.Option(
        help="What links and experts cost: a file of `semmoe calibrate`, or a shipped one, such as h200-nvlink or "
        "h200-400g, the defaults on one node and on several.",
        rich_help_panel=LINKS,
        show_default=False,
    ),
]
DecodeLinksOption = Annotated[
    str | None,
    typer.Option(
        help="The same of decoding, where its all-to-all is another, such as h200-400g-ll.",
        rich_help_panel=LINKS,
        show_default=False,
    ),
]


def phase_links(links: str | None, decode: str | None, topology: Topology) -> PhaseLinks:
    """The links given, or the default ones; decoding has those of prefill unless it has its own."""
    prefill = load_links(links or ("h200-nvlink" if topology.num_nodes == 1 else "h200-400g"), topology)
    return PhaseLinks(prefill, prefill if decode is None else load_links(decode, topology))


def phase_costs(
    ctx: typer.Context, links: PhaseLinks, topology: Topology, settings: CoclusterSettings
) -> PhaseCosts | None:
    """What the search weighs: rows as the links charge them, or the weight of a row to another node if it is given."""
    if was_given(ctx, "remote_node_cost"):
        refuse_given(ctx, ["decode_links"], "--remote-node-cost weighs rows in place of what links charge")
        return None
    return links.costs(topology, settings.activation, settings.remote_rank)
