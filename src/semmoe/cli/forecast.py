"""What `solve` says of a plan before it serves: figures of held-out requests, the verdict, the gain of a whole pass."""

from pathlib import Path
from typing import Annotated, Any

from semmoe import console, tables
from semmoe.cli import options
from semmoe.cli.form import finite
from semmoe.core import NEVER
from semmoe.cost import LayerShape, end_to_end
from semmoe.topology import Fingerprint

ShareOption = Annotated[
    float | None,
    options.links(
        "Share of a pass that all-to-alls take on your server, measured without a plan: also print the gain of a pass. "
        "At 0.4, a plan that saves 30 % of this time on --links makes it 1 / (1 - 0.4 * 0.3) = 1.136 times as fast.",
        min=0.001,
        max=0.999,
        callback=finite,
    ),
]


def layer_shape(f: Fingerprint, widths: options.Widths, share: float | None) -> LayerShape | None:
    """The shape of a layer from the trace and the given widths; None if a width is unknown.

    Raises ValueError if widths contradict the trace, or if one is unknown and a `share` of the time is given.
    """
    sizes = []
    for name in ("hidden_size", "expert_size"):
        given, known = getattr(widths, name) or 0, getattr(f, name)
        if 0 not in (given, known) and given != known:
            raise ValueError(f"--{name.replace('_', '-')} is {given}, but the trace was profiled with {known}")
        sizes.append(given or known)
    if share is not None and not all(sizes):
        raise ValueError("--share needs the widths of the model: give --hidden-size and --expert-size")
    return LayerShape(hidden_size=sizes[0], expert_size=sizes[1], top_k=f.top_k) if all(sizes) else None


def print_expected(out: Path, method: str, expected: dict[str, Any] | None) -> None:
    """Print the figures of a plan on held-out requests beside those of other methods, and the verdict."""
    if expected is None:
        console.out.print(f"{out}: too few requests to hold any out, so nothing can be expected of this plan")
        return
    served = f", {expected['running']} at a time on each rank" if expected["running"] else ""
    title = f"{out}: expected, from {expected['requests']} held-out requests{served}"
    console.print_table(title, *tables.metrics({method: expected, **expected["others"]}))
    tables.print_prediction(method, {**expected, "layers": []})  # single layers are for the report
    if expected["verdict"] is None:
        return
    least = expected.get("shuffle_from")
    if least is not None:
        shuffled = f"passes with at least {least:,} rows are shuffled"
        if least == NEVER:
            shuffled = "no pass is shuffled: on these links that costs more than it saves"
        console.out.print(f"{shuffled}; `semmoe serve --shuffle-from` overrides", soft_wrap=True)
    decode, tokens = expected.get("decode"), expected["tokens_per_batch"]
    _print_judged(expected, "prefill, " if decode else "", tokens)
    if decode:
        _print_judged(decode, "decode, ", tokens)


def _print_judged(judged: dict[str, Any], phase: str, tokens: float) -> None:
    links, without = judged["links"], judged["without_all_to_all"]
    known = f"{links['kind']}, a row {links['all_to_all'].replace('-', ' ')}"
    words = f"{phase}on {links['name']} ({known}), {tokens:,.0f} tokens a batch"
    if without is not None:
        words += f"; without all-to-all a layer takes {without['layer_us']:,.0f} us"
    console.out.print(f"{words}:", markup=False)
    console.out.print(judged["verdict"]["sentence"], style="bold", markup=False)


def gain_of_pass(expected: dict[str, Any] | None, share: float | None) -> dict[str, Any]:
    """The gain of a whole pass over one on the linear placement, by name; nothing without a share or a forecast."""
    if share is None or expected is None:
        return {}
    linear = expected["others"].get("linear", expected)["all_to_all_us"]
    saving = 1 - expected["all_to_all_us"] / linear if linear > 0 else 0.0
    gain = {"share": share, "saving": saving, "gain": end_to_end(share, saving), "links": expected["links"]["name"]}
    return {"end_to_end": gain}


def print_gain_of_pass(result: dict[str, Any]) -> None:
    """Print what `gain_of_pass` found, if anything."""
    if "end_to_end" not in result:
        return
    found = result["end_to_end"]
    words = (
        f"of the {found['share']:.1%} of a pass that all-to-alls take, the plan saves {found['saving']:.1%} on "
        f"{found['links']}: a pass is {found['gain']:.3f} times as fast, if nothing else of it changes"
    )
    console.out.print(words, markup=False, highlight=False, soft_wrap=True)
