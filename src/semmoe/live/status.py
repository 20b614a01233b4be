"""The files through which `semmoe swap` and the ranks of a server agree on a plan.

    FOLDER/plans/NAME/           a plan, staged by `semmoe swap` before it tells the engine its number
    FOLDER/swap-00000.json       written by each rank: which plan it serves on, and what became of the last swap

A plan's number is the first 48 bits of a digest of all that it holds, and its name the same in hexadecimal. Engines get
the number alone: a rank cannot take another plan for it, and nothing that a client sends is used as a path.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from semmoe.core import Plan
from semmoe.engines.private import make_private, read_private
from semmoe.engines.settings import PLANS
from semmoe.io.files import save_json
from semmoe.numeric.digests import digest
from semmoe.plan import load_plan, save_plan

DIGITS = 12  # of a name
MOST_NUMBER = (1 << 4 * DIGITS) - 1  # which is exact as a float, too
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ENDED = ("none", "done", "refused", "failed")


class SwapStatus(BaseModel):
    """Contents of `swap-NNNNN.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    rank: Count
    plan: Count  # the number of the plan that is served, or was when a swap began that has not ended
    expert_bytes: Count = 0  # weights of an expert in a layer, as the engine holds them
    asked: Count = 0  # the number of the plan that the last swap was to
    swaps: Count = 0  # that were asked for since the server started
    state: Literal["none", "preparing", "moving", "done", "refused", "failed"] = "none"
    reason: str = Field(default="", max_length=2000)  # why it was refused or failed
    layers: Count = 0  # whose experts move
    layers_done: Count = 0
    moved: Count = 0  # slots of this rank that got another expert
    received_bytes: Count = 0  # weights of experts that came from other ranks
    seconds: Seconds = 0.0  # total wait of forward passes for this rank
    longest: Seconds = 0.0  # longest wait of a single pass


def plan_number(plan: Plan) -> int:
    """The first 48 bits of the digest of all that a plan holds."""
    return int.from_bytes(digest(plan)[: DIGITS // 2].tobytes(), "big")


def plan_name(number: int) -> str:
    """Return a plan's number in hexadecimal; raise ValueError if it is out of range."""
    if not 0 < number <= MOST_NUMBER:
        raise ValueError(f"{number} is not a plan's number")
    return f"{number:0{DIGITS}x}"


def stage(plan: Plan, folder: Path) -> int:
    """Write a plan to where the ranks of this node look for it; returns its number.

    One that lies there stays, since a rank may be reading it: to replace a directory is not atomic for a reader.
    """
    number = plan_number(plan)
    make_private(folder / PLANS)
    try:
        staged(folder, number)
    except ValueError:
        save_plan(plan, folder / PLANS / plan_name(number))
    return number


def staged(folder: Path, number: int) -> Plan:
    """The staged plan of this number. Raises ValueError if there is none, or another under its name."""
    path = folder / PLANS / plan_name(number)
    if not path.exists():
        raise ValueError(f"plan {plan_name(number)} is not staged on this node: `semmoe swap --stage-only` does that")
    plan = load_plan(path)
    if plan_number(plan) != number:
        raise ValueError(f"{path} holds another plan than its name says")
    return plan


def status_path(folder: Path, rank: int) -> Path:
    return folder / f"swap-{rank:05d}.json"


def write_status(folder: Path, status: SwapStatus) -> None:
    save_json(status_path(folder, status.rank), status, private=True)


def read_status(folder: Path, rank: int = 0) -> SwapStatus:
    """Return the last status of a rank; raise ValueError if the rank wrote none that can be trusted."""
    return read_private(status_path(folder, rank), SwapStatus)


def serving(folder: Path) -> Plan:
    """The plan that the server runs on. Raises ValueError if it runs without one."""
    status = read_status(folder)
    if not status.plan:
        raise ValueError(status.reason)
    return staged(folder, status.plan)


def read_statuses(folder: Path) -> list[SwapStatus]:
    """Those of all ranks of this node."""
    paths = sorted(folder.glob("swap-[0-9][0-9][0-9][0-9][0-9].json"))
    return [read_private(path, SwapStatus) for path in paths]
