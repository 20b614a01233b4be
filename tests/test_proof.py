"""The proof of a family that no test has run, on two ranks: it passes, and a loader with one fault does not."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import on_ranks
from synthetic import make_fingerprint
from torch import nn

from semmoe.core import Placement
from semmoe.engines.proof import Proof, check_routing, check_sizes
from semmoe.placement.linear import vanilla_plan
from semmoe.topology import Topology

EXPERTS, SLOTS = 4, 3  # per layer, and per rank: two slots hold copies
MAP = np.array([[3, 0, 1, 2, 3, 0], [1, 1, 2, 0, 3, 2]], np.int32)


def plan():
    made = vanilla_plan(make_fingerprint(num_layers=2, num_experts=EXPERTS, top_k=2), Topology(ep_size=2, dp_size=2))
    return replace(made, placement=Placement(physical_to_logical_map=MAP, num_experts=EXPERTS, ep_size=2))


class Engine:
    """A model of two expert layers and a norm, loaded by the map of the plan or of no plan; `fault` spoils it."""

    def __init__(self, rank, fault):
        self.rank, self.fault = rank, fault
        self.by_plan, self.loads = True, 0
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in MAP)
        for layer in self.model.layers:
            layer.weight = nn.Parameter(torch.zeros(SLOTS, 5))
            layer.correction_bias = nn.Parameter(torch.zeros(SLOTS))
        self.model.norm = nn.Parameter(torch.zeros(7))

    @contextmanager
    def without_plan(self):
        self.by_plan = False
        yield
        self.by_plan = True

    def load(self):
        self.loads += 1
        for index, layer in enumerate(self.model.layers):
            experts = MAP[index] if self.by_plan and self.fault != "places by itself" else np.arange(6) % EXPERTS
            mine = torch.from_numpy(experts[self.rank * SLOTS :][:SLOTS].astype(np.float32))
            same = torch.zeros_like(mine) if self.fault == "equal" else mine
            layer.weight.data.copy_(same[:, None] + torch.arange(5.0) + 10 * index)
            if self.by_plan and index == 1 and self.rank == 1 and self.fault == "one slot":
                layer.weight.data[2, 0] = 99
        self.model.norm.data.add_(1 if self.fault == "adds up" else 0)
        return "loaded"

    def layers(self, model):
        found = dict(enumerate(model.layers))
        return {0: found[0]} if self.fault == "hidden layer" else found


def prove(comm, fault):
    engine = Engine(comm.rank, fault)
    proof = Proof(plan(), engine.layers, lambda: comm.group)
    try:
        with pytest.raises(ValueError, match="omit --load-format"):
            proof.check()
        out = proof.load(engine.model, engine.load, engine.without_plan), proof.load(None, engine.load, None)
        proof.check()
    except ValueError as error:
        return str(error)
    return out, engine.loads


FAULTS = {
    "places by itself": "the weights of expert 3 in slot 0 differ from the engine's without a plan",
    "one slot": "the weights of expert 2 in slot 5 differ from the engine's without a plan",
    "equal": "some experts of MoE layer 0 have equal weights",
    "adds up": "weights that belong to no slot are not the same after a second load",
    "hidden layer": "Module has 1 layers of the engine's fused experts, and the checkpoint has 2 layers with experts",
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_weights_are_proven_or_the_fault_is_named_on_every_rank(fault, tmp_path):
    job = functools.partial(prove, fault=fault)
    job.__name__ = "prove"
    for found in on_ranks(2, job, tmp_path):
        if fault:
            assert FAULTS[fault] in found
        else:
            assert found == (("loaded", "loaded"), 3)  # twice for the proof, once for a draft model


def test_sizes_and_routing_are_the_plans():
    layer = nn.Module()
    layer.num_experts, layer.top_k = 6, 2
    check_sizes([layer, layer], "top_k", plan())
    layer.top_k = 3
    with pytest.raises(ValueError, match=r"MoE layer 0 has \(6, 3\) .* the plan has \(6, 2\)"):
        check_sizes([layer], "top_k", plan())
    check_routing(1, torch.tensor([[0, 3]]), plan())
    check_routing(1, torch.zeros(0, 2, dtype=torch.int64), plan())
    with pytest.raises(ValueError, match="MoE layer 1 routes to expert 4, the plan has 4"):
        check_routing(1, torch.tensor([[0, 4]]), plan())
