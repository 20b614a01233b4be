"""Swap the plan that a server runs on, in small steps between its forward passes.

An adaptor calls `arm` when its engine receives a new plan, and `step` between passes. Every rank calls both at the same
place of its loop, since `step` sends messages to all ranks.

    arm      a thread reads the plan, checks it and makes its tables, while the server serves
    step     all ranks vote: while one is not ready nothing happens; if one cannot, nothing ever does
    step ... then experts of some layers move and are checked, and then the layers' maps and copy choice follow; mixed
             states are right, since every layer has its own. With the last layers the token tables follow

A failure after the vote may have left weights half moved on some rank: nothing may be served after it, and the
adaptor ends the process on `SwapError`.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from semmoe.core import Plan
from semmoe.engines.counters import Reading
from semmoe.live.canary import by_expert, check_slots, checksums, of_all_slots
from semmoe.live.status import SwapStatus, plan_name, plan_number, stage, staged, write_status

log = logging.getLogger(__name__)


class SwapError(RuntimeError):
    """Why a server on which layers have moved cannot go on."""


class Experts(Protocol):
    """An engine's actions on the experts and tables of a rank. Layers are numbered among the MoE layers."""

    def prepare(self, plan: Plan) -> None:
        """Make all that `commit` and `finish` install, beside the passes that run. Raises ValueError if it cannot."""

    def weights(self, layer: int) -> Sequence[Tensor]:
        """The weights of this rank's slots, each (P / G, ...), whose contents `move` changes."""

    def move(self, layer: int, old: np.ndarray, new: np.ndarray) -> None:
        """Move weights from the slots of `old` (P,) logical ids to those of `new`, together with all ranks."""

    def commit(self, layers: Sequence[int]) -> None:
        """Install the maps and the copy choice of the prepared plan for these layers."""

    def finish(self) -> None:
        """Install the token tables of the prepared plan."""


class Swapper:
    """One rank's swaps, one at a time.

    plan: what the rank serves on. group: a process group of the CPU over all ranks. folder: the control folder.
    """

    def __init__(self, plan: Plan, experts: Experts, group: Any, folder: Path) -> None:
        self.plan, self._experts = plan, experts
        self._group, self._folder = group, folder
        self._next = plan
        self._vote: str | None = ""  # on the plan that this rank was armed with: None: not yet; "": ready; else why not
        self._left: list[int] = []  # layers whose experts are still to move
        self._layers_per_step = 0
        size = sum(weight[0].numel() * weight.element_size() for weight in experts.weights(0))
        self.status = SwapStatus(rank=dist.get_rank(group), plan=plan_number(plan), expert_bytes=size)
        self._done = {"done": 0, "refused": 0}
        self._moved = self._received = 0
        if self.status.rank == 0:
            self._keep(plan)
        tell(self._folder, self.status)

    def _keep(self, plan: Plan) -> None:
        """Stage the first plan, which users may want to compare others with, or go back to."""
        try:
            stage(plan, self._folder)
        except OSError as error:
            log.warning("semmoe: the plan cannot be kept in the control folder: %s", error)

    @property
    def busy(self) -> bool:
        """Whether a swap is under way."""
        return self.status.state in ("preparing", "moving")

    @property
    def refusal(self) -> str:
        """Why no swap can begin now; "" if one can."""
        return f"the swap to plan {plan_name(self.status.asked)} is not over" if self.busy else ""

    @property
    def ready(self) -> bool:
        """Whether this rank waits for nothing but the next step."""
        return self._vote is not None

    def arm(self, number: int, layers_per_step: int = 0) -> str:
        """Begin a swap to the staged plan of this number; returns why it cannot be, or "".

        layers_per_step: layers that move between two passes; 0: all that do.
        """
        if self.refusal:
            return self.refusal
        before = self.status
        self.status = SwapStatus(
            rank=before.rank, plan=before.plan, expert_bytes=before.expert_bytes, asked=number, swaps=before.swaps + 1,
            state="preparing",
        )  # fmt: skip
        self._vote = None
        self._layers_per_step = layers_per_step
        tell(self._folder, self.status)
        threading.Thread(target=self._prepare, args=(number,), name="semmoe-swap", daemon=True).start()
        return ""

    def _prepare(self, number: int) -> None:
        """Read, check and prepare; runs beside the passes and ends with this rank's vote."""
        try:
            plan = staged(self._folder, number)
            check_fits(plan, self.plan)
            self._experts.prepare(plan)
            self._next = plan
            self._vote = ""
        except Exception as error:  # what one rank cannot do, no rank does
            self._vote = one_line(error)

    def step(self) -> None:
        """Take the next step of a swap, if one is under way. Raises SwapError if the server cannot go on."""
        if not self.busy:
            return
        began = time.perf_counter()
        if self.status.state == "preparing" and not self._agreed():
            return
        try:
            self._move()
        except Exception as error:
            self._end("failed", one_line(error))
            raise SwapError(f"the swap to plan {plan_name(self.status.asked)} failed: {one_line(error)}") from error
        seconds = time.perf_counter() - began
        self._set(seconds=self.status.seconds + seconds, longest=max(self.status.longest, seconds))

    def _agreed(self) -> bool:
        """Whether all ranks are ready for the same plan, so that layers move now."""
        votes = [(self._vote, self.status.asked)] * dist.get_world_size(self._group)
        dist.all_gather_object(votes, votes[0], group=self._group)
        refusals = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(votes) if why]
        if len({number for _, number in votes}) > 1:
            refusals = ["ranks received different plans"]
        if refusals:
            self._end("refused", refusals[0])
        if refusals or any(vote is None for vote, _ in votes):
            return False
        old, new = (plan.placement.physical_to_logical_map for plan in (self.plan, self._next))
        self._left = np.flatnonzero((old != new).any(axis=1)).tolist()
        self._set(state="moving", layers=len(self._left))
        return True

    def _move(self) -> None:
        """Move the layers of this step."""
        count = self._layers_per_step or len(self._left)
        layers, self._left = self._left[:count], self._left[count:]
        for layer in layers:
            self._move_layer(layer)
        if layers:
            self._experts.commit(layers)
        self._set(layers_done=self.status.layers_done + len(layers))
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        """Install the copy choice in every layer, also where experts stay, and the token tables."""
        self._experts.commit(range(len(self.plan.placement.physical_to_logical_map)))
        self._experts.finish()
        self.plan = self._next
        self._set(plan=self.status.asked)
        self._end("done", "")

    def _move_layer(self, layer: int) -> None:
        """Move a layer's experts, and verify that each slot now holds its expected expert."""
        old, new = (plan.placement.physical_to_logical_map[layer] for plan in (self.plan, self._next))
        size, weights = len(old) // dist.get_world_size(self._group), self._experts.weights(layer)
        mine = slice(self.status.rank * size, (self.status.rank + 1) * size)
        before = of_all_slots(checksums(weights), self._group)
        expected = by_expert(before, old, self.plan.fingerprint.num_experts)
        self._experts.move(layer, old, new)
        check_slots(checksums(weights), expected, new[mine])
        came = np.setdiff1d(new[mine], old[mine]).size
        self._set(
            moved=self.status.moved + int((old[mine] != new[mine]).sum()),
            received_bytes=self.status.received_bytes + came * self.status.expert_bytes,
        )

    def _end(self, state: str, reason: str) -> None:
        self._set(state=state, reason=reason[:2000])
        if state in self._done:
            self._done[state] += 1
            self._moved += self.status.moved
            self._received += self.status.received_bytes
        if self.status.rank == 0:
            log.warning("semmoe: swap to plan %s: %s", plan_name(self.status.asked), reason or state)

    def _set(self, **changes: Any) -> None:
        self.status = self.status.model_copy(update=changes)
        tell(self._folder, self.status)

    def readings(self) -> Iterator[Reading]:
        """The counters of swaps, and the number of the plan that is served, which must be the same on all ranks."""
        labels = {"ep_rank": str(self.status.rank)}
        yield "plan_number", labels, self.status.plan
        for outcome, count in self._done.items():
            yield "swaps", labels | {"outcome": outcome}, count
        yield "swapped_slots", labels, self._moved
        yield "swapped_bytes", labels, self._received


class NoSwapper:
    """Of a server that cannot swap, and why."""

    busy, ready = False, True

    def __init__(self, reason: str) -> None:
        self.refusal = reason
        self.status = SwapStatus(rank=0, plan=0, state="refused", reason=reason)

    def arm(self, number: int, layers_per_step: int = 0) -> str:
        """Why no swap can begin."""
        return self.refusal

    def step(self) -> None:
        """Do nothing: no swap is under way."""

    def readings(self) -> Iterator[Reading]:
        """Yield nothing."""
        yield from ()


def attach(plan: Plan, experts: Experts, group: Any, folder: Path) -> Swapper | NoSwapper:
    """Return the swapper of this rank, or one that refuses if the model's experts cannot move."""
    try:
        check_weights(plan, experts)
        return Swapper(plan, experts, group, folder)
    except (ValueError, AssertionError, AttributeError) as error:  # a layout that the engine cannot move either
        return decline(f"this model's experts cannot move: {one_line(error)}", group, folder)


def decline(reason: str, group: Any, folder: Path) -> NoSwapper:
    """Return a swapper that refuses for this reason, which the rank's status then states."""
    found = NoSwapper(reason)
    tell(folder, found.status.model_copy(update={"rank": dist.get_rank(group)}))
    return found


def tell(folder: Path, status: SwapStatus) -> None:
    """Write the status of a rank; a full disk does not end a swap, or the server."""
    try:
        write_status(folder, status)
    except OSError as error:
        log.warning("semmoe: the state of a swap cannot be written: %s", error)


def check_weights(plan: Plan, experts: Experts) -> None:
    """Raise ValueError unless every layer's weights have a row for each of this rank's slots, and no other."""
    wanted = plan.placement.experts_per_rank
    for layer in range(plan.fingerprint.num_layers):
        for weight in experts.weights(layer):
            if len(weight) != wanted:
                raise ValueError(f"a weight of layer {layer} has {len(weight)} rows for {wanted} slots")


def check_fits(new: Plan, old: Plan) -> None:
    """Raise ValueError unless a server that was started on `old` can be swapped to `new`."""
    if new.topology != old.topology:
        raise ValueError(f"the plan is for {new.topology}, and the server was started for {old.topology}")
    if new.fingerprint != old.fingerprint:
        raise ValueError(f"the plan is of another model, {new.fingerprint.model!r}")
    copies = new.placement.redundant_experts, old.placement.redundant_experts
    if copies[0] != copies[1]:
        raise ValueError(f"the plan has {copies[0]} redundant experts, and the server was started with {copies[1]}")
    for what, does in (("tokens", "shuffles"), ("requests", "schedules")):
        if getattr(new, what).by_tables != getattr(old, what).by_tables:
            raise ValueError(f"one of the plans {does} {what}, and the other does not")


def one_line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
