"""Look-ups in the table of model families and features that each engine supports.

`semmoe doctor` and `semmoe serve` decide by it before anything loads, from a model's configuration and the engine's
options only, and the documentation prints it. A cell has one of three states: a test shows that it works; it should
work by the engine's source but was never run; or it is refused. What is not in the table is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semmoe.core import Plan
from semmoe.engines.support_rows import (
    FAMILIES,
    FEATURES,
    INSTEAD,
    NAMES,
    NEEDS_COPIES,
    NEEDS_SCHEDULE,
    NEEDS_SHUFFLE,
    QUANTISATION,
    Cell,
    Family,
    Feature,
    Option,
    State,
)
from semmoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is to be served: everything that look-ups in the table need."""

    engine: str
    config: Mapping[str, Any]  # the model's config.json
    topology: Topology
    redundant: int  # number of redundant experts
    shuffles: bool  # tokens are shuffled by the plan
    schedules: bool  # requests are scheduled by the plan
    options: Sequence[str]  # the engine's own options, as words


PARTS = {"dp": "attention-DP", "tp": "attention-TP", "copies": "copies", "shuffle": "tokens shuffled"}


def use_of(
    engine: str,
    config: Mapping[str, Any],
    plan: Plan,
    *,
    shuffles: bool = True,
    schedules: bool = True,
    options: Sequence[str] = (),
) -> Use:
    """What serving `plan` requires; shuffles, schedules: whether tokens and requests follow the plan."""
    return Use(
        engine=engine,
        config=config,
        topology=plan.topology,
        redundant=plan.placement.redundant_experts,
        shuffles=shuffles and plan.tokens.by_tables,
        schedules=schedules and plan.requests.by_tables,
        options=options,
    )


def problems(use: Use) -> list[str]:
    """Why this cannot be served on a plan, as messages; empty if it can."""
    return [cell.note for cell in _cells(use) if cell.state is State.refused]


def cautions(use: Use) -> list[str]:
    """Messages on the features in use that were never run."""
    return [cell.note for cell in _cells(use) if cell.state is State.reading]


def embedded_problems(config: Mapping[str, Any], topology: Topology) -> list[str]:
    """Why the embedded engine cannot run a model on ranks of this topology; empty if it can, or if layers will tell."""
    if topology.attn_tp_size == 1 or config.get("hc_mult") is None:
        return []
    kind = f"a model of type {config.get('model_type')!r}"
    return [
        f"{kind} keeps several residual streams per token (hyper-connections), which transformers runs on a plan with "
        "attention dp only: solve a plan for attention dp"
    ]


def check(use: Use) -> list[str]:
    """Raise ValueError with the first problem, or return the cautions."""
    for problem in problems(use):
        raise ValueError(problem)
    return cautions(use)


def _cells(use: Use) -> list[Cell]:
    family = _family(use)
    if isinstance(family, Cell):
        return [family]
    cells = [family.dp] if use.topology.dp_size > 1 else []
    cells += [family.tp] if use.topology.attn_tp_size > 1 else []
    cells += [family.copies] if use.redundant else []
    cells += [family.shuffle] if use.shuffles else []
    cells += [feature.cells[use.engine] for feature in FEATURES if _asked(feature, use)]
    return cells + _quantisation(use)


def _family(use: Use) -> Family | Cell:
    kind = str(use.config.get("model_type"))
    found = FAMILIES[use.engine].get(kind)
    if found is not None:
        return found
    known = ", ".join(sorted({NAMES[name] for name in FAMILIES[use.engine]}))
    return Cell(
        State.refused, f"no plan is served for models of type {kind!r} on {use.engine} (known: {known}): {INSTEAD}"
    )


def _asked(feature: Feature, use: Use) -> bool:
    idle = (feature.name in NEEDS_COPIES and not use.redundant) or (feature.name in NEEDS_SHUFFLE and not use.shuffles)
    if idle or (feature.name in NEEDS_SCHEDULE and not use.schedules):
        return False
    return any(_given(option, use.options) for option in feature.options.get(use.engine, ()))


def _given(option: Option, words: Sequence[str]) -> bool:
    """Whether the engine's words contain the option with a value that requests the feature."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option.name:
            following = words[place + 1] if place + 1 < len(words) else ""
            chosen = value or following
            return chosen in option.on if option.on else chosen not in option.off
    return False


def _quantisation(use: Use) -> list[Cell]:
    """The cell for the quantisation of the weights that the configuration states."""
    how = use.config.get("quantization_config")
    if not isinstance(how, Mapping):
        return []
    method = str(how.get("quant_method", how.get("quant_algo", "unknown")))
    found = QUANTISATION.get(method, {}).get(use.engine)
    return [found or Cell(State.refused, f"weights quantised by {method!r} are not known with a plan: {INSTEAD}")]


def uses(engine: str, config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What an engine serves of a model with this configuration on a plan, as rows of text: use, state, note."""
    use = Use(engine=engine, config=config, topology=Topology(ep_size=2), redundant=0, shuffles=False, schedules=False,
              options=())  # fmt: skip
    family = _family(use)
    if isinstance(family, Cell):
        return [("any plan", family.state.value, family.note)]
    cells = [(PARTS[part], cell) for part, cell in family._asdict().items()]
    cells += [("its quantised weights", cell) for cell in _quantisation(use)]
    return [(name, cell.state.value, cell.note) for name, cell in cells]


def table(engine: str) -> list[tuple[str, str, str]]:
    """The table of an engine as rows of text: feature, state, note."""
    rows = [
        (_parts(kind, family, cell), cell.state.value, cell.note)
        for kind, family in FAMILIES[engine].items()
        for cell in dict.fromkeys(family)
    ]
    rows += [
        (one.name, one.cells[engine].state.value, one.cells[engine].note) for one in FEATURES if engine in one.cells
    ]
    return rows + [
        (f"weights: {method}", cells[engine].state.value, cells[engine].note)
        for method, cells in QUANTISATION.items()
        if engine in cells
    ]


def _parts(kind: str, family: Family, cell: Cell) -> str:
    """A family and those of its parts that share a cell, as text."""
    return f"{NAMES[kind]}: {', '.join(PARTS[part] for part, own in family._asdict().items() if own == cell)}"
