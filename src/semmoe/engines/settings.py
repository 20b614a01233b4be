"""Settings of the plug-ins, from environment variables, so that an engine's own command line is unchanged."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from semmoe.core import NEVER, Plan

PREFIX = "SEMMOE_"
PLANS = "plans"  # in the control folder: plans that a server may be swapped to


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Every field is set by the variable SEMMOE_<FIELD>; unknown variables are errors. Engines add their own fields."""

    plan: str = ""  # a plan directory; empty: vanilla, whose traffic is counted as well
    schedule: str = "plan"  # "plan" or "engine": who assigns requests to data-parallel ranks
    shuffle: str = "plan"  # "plan" or "off": whether tokens of attention-TP groups are shuffled
    shuffle_from: str = ""  # least rows of a pass whose tokens are shuffled; empty: the plan's own number
    control: str = ""  # a folder for activity files and `semmoe record`
    untried: str = ""  # 1: the model's family was never run on a plan; the server proves that it follows the plan
    record: str = ""  # 1: routing can be recorded in CUDA graphs too, at the cost of a copy a layer in every pass

    def __post_init__(self) -> None:
        if self.schedule not in ("plan", "engine"):
            raise ValueError(f"SEMMOE_SCHEDULE must be plan or engine, not {self.schedule!r}")
        if self.shuffle_from and not (self.shuffle_from.isdecimal() and 1 <= int(self.shuffle_from) <= NEVER):
            raise ValueError(f"SEMMOE_SHUFFLE_FROM must lie between 1 and {NEVER}, not {self.shuffle_from!r}")
        if self.shuffle not in ("plan", "off"):
            raise ValueError(f"SEMMOE_SHUFFLE must be plan or off, not {self.shuffle!r}")
        check_switch("RECORD", self.record)
        check_switch("UNTRIED", self.untried)

    def served(self, plan: Plan) -> Plan:
        """Return the plan that is served: `plan`, with `shuffle_from` replaced if the settings give it."""
        return replace(plan, shuffle_from=int(self.shuffle_from)) if self.shuffle_from else plan

    def shuffles(self, plan: Plan) -> bool:
        """Whether tokens are shuffled by the plan."""
        return plan.tokens.by_tables and self.shuffle != "off"

    def schedules(self, plan: Plan) -> bool:
        """Whether requests are scheduled by the plan."""
        return plan.requests.by_tables and self.schedule == "plan"

    @property
    def folder(self) -> Path | None:
        return control_folder({PREFIX + "CONTROL": self.control})

    def environment(self) -> dict[str, str]:
        """The environment variables that give these settings."""
        return {PREFIX + name.upper(): value for name, value in asdict(self).items() if value}


def unseen_in_graphs(instead: str) -> str:
    """Why passes in CUDA graphs are not recorded; instead: the engine's option that captures none."""
    return f"passes in CUDA graphs are recorded with SEMMOE_RECORD=1 alone: set it, or serve with {instead}"


def check_switch(name: str, value: str) -> None:
    """Raise ValueError unless the variable SEMMOE_<name> is 1, 0 or empty."""
    if value not in ("", "0", "1"):
        raise ValueError(f"{PREFIX}{name} must be 0, 1 or empty, not {value!r}")


def control_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that SEMMOE_CONTROL names, even if other variables are invalid; None if it is not set."""
    return Path(environment[PREFIX + "CONTROL"]) if environment.get(PREFIX + "CONTROL") else None


Settings = TypeVar("Settings", bound=PluginSettings)


def from_environment(kind: type[Settings], environment: Mapping[str, str] = os.environ) -> Settings:
    given = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)}
    known = set(kind.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{PREFIX}{unknown[0].upper()} is not a setting; the settings are {', '.join(sorted(known))}")
    return kind(**given)
