"""Look-ups in the table of model families and features that each engine supports.

`semmoe doctor` and `semmoe serve` decide by it before anything loads, from a model's configuration and the engine's
options only, and the documentation prints it. A cell has one of three states: a test shows that it works; it should
work by the engine's source but was never run; or it is refused. All else is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from semmoe.core import Plan
from semmoe.io.files import load_json
from semmoe.topology import Topology

ENGINES = ("sglang", "vllm")
INSTEAD = "give the engine a checkpoint made by `semmoe apply`, without --plan"
PROVE = "give --untried with a plan for attention dp, so that the server proves itself at start"
# How a plan runs on one engine with one family of models: experts placed by the plan under attention-DP and under
# attention-TP (hybrid needs both), redundant experts, and tokens shuffled by the plan. Some families have one cell.
PARTS = {
    "any": "any plan",
    "dp": "attention-DP",
    "tp": "attention-TP",
    "copies": "copies",
    "shuffle": "tokens shuffled",
}


class State(str, Enum):
    works = "works, by a test"
    reading = "works by reading, not run"
    proof = "with --untried, if it proves itself at start"
    refused = "refused"


class Cell(NamedTuple):
    state: State
    note: str  # the test, the source that was read, or the reason for the refusal and the alternative


Family = Mapping[str, Cell]  # by part


class Option(NamedTuple):
    """An option of an engine's command line that requests a feature."""

    name: str  # with its dashes
    off: tuple[str, ...] = ()  # values that do not request the feature
    on: tuple[str, ...] = ()  # if not empty, the only values that request the feature


class Row(BaseModel):
    """A part of `support.json`. In its notes ENGINE is the engine, and {instead} is INSTEAD."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FamilyRow(Row):
    name: str
    test: str = ""  # of the parts that are not refused
    only: str = ""  # the one engine on which the family was run; "": on all
    refused: dict[str, dict[str, str]] = {}  # by engine and part: why, and what to do instead

    def cells(self, engine: str) -> Family:
        refused = {part: _cell("refused", why, engine) for part, why in self.refused.get(engine, {}).items()}
        if "any" in refused:
            return refused
        return {part: refused.get(part, _cell("works", self.test, engine)) for part in PARTS if part != "any"}


class CellRow(Row):
    state: Literal["works", "reading", "proof", "refused"]
    note: str

    def cell(self, engine: str) -> Cell:
        return _cell(self.state, self.note, engine)


class FeatureRow(CellRow):
    """A feature: `--a` requests it with any value, `--a=x,y` with these values alone, `--a!=x,y` with all others."""

    name: str
    sglang: str | None = None  # options that request it; None: the row is not about this engine
    vllm: str | None = None
    needs: str = ""  # the attribute of `Use` without which the feature does no harm; "" if there is none
    unless: str = ""  # an option of the engine beside which it does no harm; "" if there is none

    @property
    def options(self) -> dict[str, tuple[Option, ...]]:
        """By engine."""
        words = {engine: getattr(self, engine) for engine in ENGINES}
        return {engine: tuple(map(_option, text.split())) for engine, text in words.items() if text is not None}

    @property
    def cells(self) -> dict[str, Cell]:
        """By engine, for use with a plan."""
        return {engine: self.cell(engine) for engine in self.options}


class QuantisationRow(Row):
    methods: list[str]
    sglang: CellRow
    vllm: CellRow


class ArchitectureRow(CellRow):
    """Classes of an engine that can hold experts: by engine, the words of `architectures` in config.json."""

    sglang: str = ""
    vllm: str = ""

    def names(self, engine: str) -> list[str]:
        return str(getattr(self, engine)).split()


class Support(Row):
    decided: dict[str, str]  # by engine, its options that a plan decides
    families: dict[str, FamilyRow]  # by the model_type of config.json
    architectures: list[ArchitectureRow]  # all of each engine
    features: list[FeatureRow]
    quantisation: list[QuantisationRow]


def _cell(state: str, note: str, engine: str) -> Cell:
    return Cell(State[state], note.replace("ENGINE", engine).replace("{instead}", INSTEAD))


def _option(text: str) -> Option:
    name, _, values = text.partition("=")
    listed = tuple(values.split(",")) if values else ()
    return Option(name[:-1], off=listed) if name.endswith("!") else Option(name, on=listed)


_SUPPORT = load_json(Path(__file__).with_name("support.json"), Support)
NAMES = {kind: row.name for kind, row in _SUPPORT.families.items()}
FAMILIES = {
    engine: {kind: row.cells(engine) for kind, row in _SUPPORT.families.items() if row.only in ("", engine)}
    for engine in ENGINES
}
ARCHITECTURES = {
    engine: {name: row.cell(engine) for row in _SUPPORT.architectures for name in row.names(engine)}
    for engine in ENGINES
}
FEATURES = _SUPPORT.features
DECIDED = {engine: set(words.split()) for engine, words in _SUPPORT.decided.items()}
QUANTISATION = {
    method: {engine: getattr(row, engine).cell(engine) for engine in ENGINES}
    for row in _SUPPORT.quantisation
    for method in row.methods
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """A model and the way that it is served: everything that look-ups in the table need."""

    engine: str
    config: Mapping[str, Any]  # the model's config.json
    topology: Topology
    redundant: int  # number of redundant experts
    shuffles: bool  # tokens are shuffled by the plan
    schedules: bool  # requests are scheduled by the plan
    options: Sequence[str]  # the engine's own options, as words
    untried: bool = False  # a family that was never run may prove itself at start


def use_of(
    engine: str,
    config: Mapping[str, Any],
    plan: Plan,
    *,
    shuffles: bool = True,
    schedules: bool = True,
    options: Sequence[str] = (),
    untried: bool = False,
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
        untried=untried,
    )


def problems(use: Use) -> list[str]:
    """Why this cannot be served on a plan, as messages; empty if it can."""
    return [cell.note for cell in _cells(use) if cell.state is State.refused]


def cautions(use: Use) -> list[str]:
    """Messages on the features in use that were never run."""
    return [cell.note for cell in _cells(use) if cell.state is State.reading]


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
    cells = [cell for part, cell in _family(use.engine, use.config, use.untried).items() if parts[part]]
    cells += [feature.cells[use.engine] for feature in FEATURES if _asked(feature, use)]
    return list(dict.fromkeys(cells + _quantisation(use.engine, use.config)))


def _family(engine: str, config: Mapping[str, Any], untried: bool = False) -> Family:
    """The cells of a model's family by part; untried: of a family that was never run, those of its proof at start."""
    kind = str(config.get("model_type"))
    if kind in FAMILIES[engine]:
        return FAMILIES[engine][kind]
    names = config.get("architectures")
    known = ARCHITECTURES[engine].get(str(names[0])) if isinstance(names, list) and names else None
    if known is not None and known.state is State.refused:
        return {"any": known}
    who = f"models of type {kind!r} were never run on a plan on {engine}"
    if not untried:
        others = ", ".join(sorted(map(NAMES.__getitem__, FAMILIES[engine])))
        return {"any": Cell(State.refused, f"{who} (these were: {others}): {PROVE}, or {INSTEAD}")}
    elsewhere = Cell(State.refused, f"{who}, and prove themselves in attention-DP alone: solve a plan for attention dp")
    proof = f"{who}: the server ends unless it proves, while it loads and in its first pass, that the plan is followed"
    return {"any": Cell(State.reading, proof), "tp": elsewhere, "shuffle": elsewhere}


def _asked(feature: FeatureRow, use: Use) -> bool:
    harmless = (feature.needs and not getattr(use, feature.needs)) or feature.unless in use.options
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
