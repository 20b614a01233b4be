"""What a plug-in is told: environment variables, so that an engine's own command line stays the engine's."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from semmoe.settings import GRANULARITIES

PREFIX = "SEMMOE_"


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Every field is the variable SEMMOE_<FIELD>; unknown ones are errors. Engines add their own."""

    plan: str = ""  # a plan directory; empty: vanilla, whose traffic is counted all the same
    schedule: str = "plan"  # requests to data-parallel ranks by the plan, or by the engine
    shuffle: str = "layer"  # tokens inside attention-TP groups: once a layer, once a batch, or off
    control: str = ""  # a folder for activity files and `semmoe record`

    def __post_init__(self) -> None:
        if self.schedule not in ("plan", "engine"):
            raise ValueError(f"SEMMOE_SCHEDULE must be plan or engine, not {self.schedule!r}")
        allowed = (*GRANULARITIES, "off")
        if self.shuffle not in allowed:
            raise ValueError(f"SEMMOE_SHUFFLE must be one of {', '.join(allowed)}, not {self.shuffle!r}")

    @property
    def folder(self) -> Path | None:
        return control_folder({PREFIX + "CONTROL": self.control})

    def environment(self) -> dict[str, str]:
        """The variables that say the same."""
        return {PREFIX + name.upper(): value for name, value in asdict(self).items() if value}


def control_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that SEMMOE_CONTROL names, even where other variables are wrong; None: none."""
    return Path(environment[PREFIX + "CONTROL"]) if environment.get(PREFIX + "CONTROL") else None


Settings = TypeVar("Settings", bound=PluginSettings)


def from_environment(kind: type[Settings], environment: Mapping[str, str] = os.environ) -> Settings:
    given = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)}
    known = set(kind.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{PREFIX}{(unknown or [''])[0].upper()} is no setting; there are {', '.join(sorted(known))}")
    return kind(**given)
