"""Swaps of a plan between forward passes, on real gloo ranks with a small model; and the pieces of it."""

import json
import re
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_experts import LiveExperts, transfers
from models import build
from ranks import on_ranks

from semmoe.engines.transformers import generate, verify
from semmoe.engines.transformers.batch import cut, step
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.parallel import ParallelModel
from semmoe.engines.transformers.recorder import record
from semmoe.live import canary, status, swap
from semmoe.live.swap import SwapError, Swapper, check_fits
from semmoe.plan import load_plan, save_plan
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

EASY = CoclusterSettings(starts=1, steps=10)
PROMPTS = [[5, 9, 200, 31, 7, 90, 4], [8, 1000, 3], [44, 45, 46, 47, 48, 49, 50, 51], [17], [301, 2, 77, 12]]
TOKENS = 6
ORDER = np.random.default_rng(0).integers(0, 4, 8)  # plans that are swapped to, one after the other


def shuffled(plan, seed):
    """The plan with another random placement of as many copies."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(row) for row in plan.placement.physical_to_logical_map]
    placement = replace(plan.placement, physical_to_logical_map=np.stack(rows), static_dispatch=None)
    return replace(plan, placement=placement, settings=plan.settings | {"seed": seed})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plans for attention-TP and attention-DP, with copies, each with four others to swap to; staged."""
    folder = tmp_path_factory.mktemp("swaps")
    path = build("qwen3_moe", folder)
    trace = record(load_model(path), path, PROMPTS * 4, folder / "trace")
    for name, topology in {"tp": Topology(ep_size=2), "dp": Topology(ep_size=2, dp_size=2)}.items():
        plan = solve(trace, topology, SolveSettings(redundant_experts=4, cocluster=EASY))
        save_plan(plan, folder / name)
        control = folder / f"{name}-control"
        control.mkdir(mode=0o700)
        for seed in range(4):
            other = shuffled(load_plan(folder / name), seed)
            save_plan(other, folder / f"{name}-{seed}")
            status.stage(other, control)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    settings = GenerateSettings(max_new_tokens=TOKENS, batch_size=8)
    return verify.plain_generate(load_model(str(folder / "qwen3_moe")), PROMPTS, settings)


@dataclass
class Rank:
    """One rank of the embedded engine and its swaps."""

    parallel: ParallelModel
    experts: LiveExperts
    swapper: Swapper

    def to(self, number, layers=0, between=lambda: None):
        """Swap; `between` is called between two steps."""
        assert self.swapper.arm(number, layers) == ""
        while self.swapper.busy:
            self.swapper.step()
            between()
            time.sleep(0.002)
        return self.swapper.status


def rank(comm, folder, name):
    plan = load_plan(folder / name)
    attention = generate.attention_communicator(comm, plan.topology)
    parallel = ParallelModel(load_model(str(folder / "qwen3_moe")), plan, comm, attention)
    experts = LiveExperts(parallel)
    return Rank(parallel, experts, Swapper(plan, experts, comm.group, folder / f"{name}-control"))


def number(folder, name):
    return status.plan_number(load_plan(folder / name))


def answers(found, between=lambda: None):
    """Every prompt by every rank; `between` is called between two passes."""
    (batch,) = cut(PROMPTS, 8, TOKENS, found.parallel.model)
    while not batch.done:
        step(found.parallel.model, batch, found.parallel.begin)
        between()
    return batch.generated


def swaps_between_passes(comm, folder, name):
    found, told = rank(comm, folder, name), []
    for i in ORDER:
        found.swapper.arm(number(folder, f"{name}-{i}"), int(i))
        told.append(answers(found, found.swapper.step))
        while found.swapper.busy:
            found.swapper.step()
        assert found.swapper.status.state == "done"
    return told, found.swapper.status.model_dump(), dict(_counted(found.swapper))


def _counted(swapper):
    for name, labels, value in swapper.readings():
        yield f"{name} {labels.get('outcome', '')}".strip(), value


@pytest.mark.parametrize("name", ["tp", "dp"])
def test_outputs_are_the_same_before_while_and_after_experts_move(name, folder, reference, tmp_path):
    """Eight swaps, with one layer or several between two passes of requests that are under way."""
    ranks = on_ranks(2, named(swaps_between_passes, folder, name), tmp_path)
    for told, _, _ in ranks:
        assert told == [reference] * len(ORDER)
    statuses = [status for _, status, _ in ranks]
    assert {status["plan"] for status in statuses} == {number(folder, f"{name}-{ORDER[-1]}")}
    counts = [counted for _, _, counted in ranks]
    assert all(c["swaps done"] == len(ORDER) and c["swaps refused"] == 0 for c in counts)
    assert all(c["swapped_slots"] > len(ORDER) for c in counts)
    assert all(c["swapped_bytes"] > 0 for c in counts)


def named(job, *args):
    """A job of `on_ranks`, with arguments."""
    call = partial(_call, job, args)
    call.__name__ = job.__name__
    return call


def _call(job, args, comm):
    return job(comm, *args)


def refusals(comm, folder):
    """What one rank cannot do, none does."""
    found, out = rank(comm, folder, "tp"), {}
    before = found.swapper.status.plan
    if comm.rank == 0:  # as one command does; no rank looks for it before it is there
        status.stage(load_plan(folder / "dp"), folder / "tp-control")
    torch.distributed.barrier()
    out["another topology"] = found.to(number(folder, "dp")).reason
    out["nowhere staged"] = found.to(12345).reason
    if comm.rank == 1:
        found.experts.prepare = fail
    out["no memory on one rank"] = found.to(number(folder, "tp-0")).reason
    found.experts.prepare = lambda plan: None  # both ranks can
    out["ranks received different plans"] = found.to(number(folder, f"tp-{comm.rank}")).reason
    held = threading.Event()
    found.experts.prepare = lambda plan: held.wait()
    assert found.swapper.arm(number(folder, "tp-1")) == ""
    out["busy"] = found.swapper.arm(number(folder, "tp-2"))
    assert not found.swapper.ready
    held.set()
    while not found.swapper.ready:
        time.sleep(0.002)
    assert found.swapper.status.plan == before
    return out, dict(_counted(found.swapper))


def fail(plan):
    raise MemoryError("no room for a buffer")


def test_what_one_rank_cannot_do_no_rank_does(folder, tmp_path):
    # Where both ranks refuse, either may be the first to say so.
    for out, counted in on_ranks(2, named(refusals, folder), tmp_path):
        assert re.match(r"rank [01]: the plan is for Topology", out.pop("another topology"))
        not_staged = "plan 000000003039 is not staged on this node: `semmoe swap --stage-only` does that"
        assert re.fullmatch(f"rank [01]: {not_staged}", out.pop("nowhere staged"))
        assert out.pop("no memory on one rank") == "rank 1: MemoryError: no room for a buffer"
        assert out.pop("ranks received different plans") == "ranks received different plans"
        assert out.pop("busy").endswith("is not over")
        assert counted["swaps refused"] == 4
        assert counted["swaps done"] == 0


def test_a_plan_that_is_staged_again_stays_where_ranks_may_read_it(folder, tmp_path):
    plan = load_plan(folder / "tp-0")
    path = tmp_path / status.PLANS / status.plan_name(status.stage(plan, tmp_path))
    before = path.stat().st_ino
    assert status.stage(plan, tmp_path) == status.plan_number(plan)
    assert path.stat().st_ino == before
    (path / "plan.json").write_text("{}")  # but one that is damaged is written anew
    status.stage(plan, tmp_path)
    assert status.plan_number(status.staged(tmp_path, status.plan_number(plan))) == status.plan_number(plan)


def one_slot_stays(comm, folder):
    found = rank(comm, folder, "tp")
    move = found.experts.move

    def incomplete(layer, old, new):
        """All but one slot of rank 1."""
        weights, size = found.experts.weights(layer), len(old) // 2
        kept = [weight[0].clone() for weight in weights]
        move(layer, old, new)
        if comm.rank == 1 and old[size] != new[size]:
            for weight, before in zip(weights, kept, strict=True):
                weight[0].copy_(before)

    found.experts.move = incomplete
    try:
        found.to(number(folder, "tp-3"))
    except SwapError as error:
        return str(error), found.swapper.status.model_dump()
    return "", found.swapper.status.model_dump()


def test_an_expert_that_did_not_move_is_noticed_before_a_token_meets_it(folder, tmp_path):
    """The negative control of the canary. Rank 0, whose slots are right, waits for rank 1, which ends."""
    (_, _), (error, status) = on_ranks(2, named(one_slot_stays, folder), tmp_path)
    assert "the weights of expert" in error
    assert "in slot 0 differ from those before the move" in error
    assert (status["state"], status["layers_done"]) == ("failed", 0)


def without_room(comm, folder):
    """A swap while nothing can be written."""
    found = rank(comm, folder, "dp")

    def full(*args):
        raise OSError(28, "No space left on device")

    swap.write_status = full
    return found.to(number(folder, "dp-1")).state, answers(found)


def test_a_full_disk_ends_no_swap(folder, reference, tmp_path):
    assert on_ranks(2, named(without_room, folder), tmp_path) == [("done", reference)] * 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32, torch.float64]
)
def test_checksums_tell_slots_apart(dtype):
    values = torch.arange(24).reshape(4, 6).to(dtype)
    sums = canary.checksums([values, values.flip(0)])
    assert sums.shape == (4, 4)
    assert len({tuple(row) for row in sums.tolist()}) == 4
    assert torch.equal(canary.checksums([values, values.flip(0)]), sums)
    assert not torch.equal(canary.checksums([values.flip(1), values.flip(0)]), sums)  # the same words in another order


def test_checksums_of_slots_at_odd_places_in_memory():
    values = torch.arange(15, dtype=torch.bfloat16).reshape(5, 3)[1:]
    assert len({tuple(row) for row in canary.checksums([values]).tolist()}) == 4


def test_copies_of_an_expert_that_differ_are_noticed():
    """By hand: slots hold experts 0, 1, 0, and the two slots of expert 0 differ."""
    found = torch.tensor([[1, 1], [5, 5], [2, 1]])
    with pytest.raises(ValueError, match="the weights of expert 0 in slot 0 differ from another copy"):
        canary.by_expert(found, np.array([0, 1, 0]), 2)
    found[2, 0] = 1
    assert canary.by_expert(found, np.array([0, 1, 0]), 2).tolist() == [[1, 1], [5, 5]]


def test_transfers_by_hand():
    held, wanted = np.array([[0, 1], [2, 3]]), np.array([[0, 2], [1, 3]])
    assert transfers(held, wanted) == [(2, 1, 0), (1, 0, 1)]
    assert transfers(held, held) == []


def test_a_plan_for_another_number_of_copies_is_refused(folder):
    plan = load_plan(folder / "tp")
    row = np.concatenate([np.arange(8), [0, 1]]).astype(np.int32)
    fewer = replace(plan.placement, physical_to_logical_map=np.tile(row, (3, 1)), static_dispatch=None)
    with pytest.raises(ValueError, match="has 2 redundant experts, and the server was started with 4"):
        check_fits(replace(plan, placement=fewer), plan)


def test_a_staged_plan_is_the_one_that_its_number_says(folder, tmp_path):
    plan = load_plan(folder / "tp")
    tmp_path.chmod(0o700)
    found = status.stage(plan, tmp_path)
    assert status.plan_number(status.staged(tmp_path, found)) == found == status.plan_number(plan)
    path = tmp_path / "plans" / status.plan_name(found) / "plan.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"method": "another"}))
    with pytest.raises(ValueError, match="holds another plan than its name says"):
        status.staged(tmp_path, found)


@pytest.mark.parametrize("wrong", [0, -1, status.MOST_NUMBER + 1])
def test_numbers_that_no_plan_has(wrong):
    with pytest.raises(ValueError, match="is not a plan's number"):
        status.staged(Path("/nonexistent"), wrong)


def test_the_largest_number_of_a_plan_has_a_name():
    assert status.plan_name(status.MOST_NUMBER) == "f" * status.DIGITS
    assert status.plan_name(1) == "0" * (status.DIGITS - 1) + "1"
