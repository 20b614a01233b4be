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
    PARTS,
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
    return [
        f"a model of type {config.get('model_type')!r} keeps several residual streams per token (hyper-connections), "
        "which transformers runs on a plan with attention dp only: solve a plan for attention dp"
    ]


def check(use: Use) -> list[str]:
    """Raise ValueError with the first problem, or return the cautions."""
    for problem in problems(use):
        raise ValueError(problem)
    return cautions(use)


def _cells(use: Use) -> list[Cell]:
    parts = {
        "any": True,
        "dp": use.topology.dp_size > 1,
        "tp": use.topology.attn_tp_size > 1,
        "copies": use.redundant > 0,
        "shuffle": use.shuffles,
    }
    cells = [cell for part, cell in _family(use.engine, use.config).items() if parts[part]]
    cells += [feature.cells[use.engine] for feature in FEATURES if _asked(feature, use)]
    return list(dict.fromkeys(cells + _quantisation(use.engine, use.config)))


def _family(engine: str, config: Mapping[str, Any]) -> Family:
    """The cells of a model's family by part; one cell for any plan if the family is unknown."""
    kind = str(config.get("model_type"))
    known = ", ".join(sorted(map(NAMES.__getitem__, FAMILIES[engine])))
    why = f"no plan is served for models of type {kind!r} on {engine} (known: {known}): {INSTEAD}"
    return FAMILIES[engine].get(kind, {"any": Cell(State.refused, why)})


def _asked(feature: Feature, use: Use) -> bool:
    harmless = feature.needs and not getattr(use, feature.needs)
    return not harmless and any(_given(option, use.options) for option in feature.options.get(use.engine, ()))


def _given(option: Option, words: Sequence[str]) -> bool:
    """Whether the engine's words contain the option with a value that requests the feature."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == option.name:
            chosen = value or following
            return chosen in option.on if option.on else chosen not in option.off
    return False


def _quantisation(engine: str, config: Mapping[str, Any]) -> list[Cell]:
    """The cell for the quantisation of the weights that the configuration states."""
    how = config.get("quantization_config")
    if not isinstance(how, Mapping):
        return []
    method = str(how.get("quant_method", how.get("quant_algo", "unknown")))
    if method in QUANTISATION:
        return [QUANTISATION[method][engine]]
    return [Cell(State.refused, f"weights quantised by {method!r} are not known with a plan: {INSTEAD}")]


def uses(engine: str, config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What an engine serves of a model with this configuration on a plan, as rows of text: use, state, note."""
    rows = [(PARTS[part], cell) for part, cell in _family(engine, config).items()]
    rows += [("its quantised weights", cell) for cell in _quantisation(engine, config)]
    return [(name, cell.state.value, cell.note) for name, cell in rows]


def table(engine: str) -> list[tuple[str, str, str]]:
    """The table of an engine as rows of text: feature, state, note."""
    rows = [
        (f"{NAMES[kind]}: {', '.join(PARTS[part] for part, own in family.items() if own == cell)}", cell)
        for kind, family in FAMILIES[engine].items()
        for cell in dict.fromkeys(family.values())
    ]
    rows += [(feature.name, feature.cells[engine]) for feature in FEATURES if engine in feature.cells]
    rows += [(f"weights: {method}", cells[engine]) for method, cells in QUANTISATION.items()]
    return [(what, cell.state.value, cell.note) for what, cell in rows]
