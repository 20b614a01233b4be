"""What CUDA graphs would hold of vLLM's passes on a plan, and the slots of its requests."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import reference as plain
import torch
from captured import GPU, SIZES, fake_ranks, on_gpu, replays
from vllm.config import CUDAGraphMode

from semmoe.engines.vllm.model import check_split
from semmoe.engines.vllm.routing import RealRows, RoutedLayer
from semmoe.engines.vllm.shuffle import LayerShuffle, check_graphs
from semmoe.engines.vllm.step import Slots
from semmoe.plan import load_plan
from semmoe.runtime import kernels
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.shuffler import Shuffler
from semmoe.runtime.traffic import TrafficCounter


class Captured:
    """One rank's layers as vLLM calls our hooks in a decode pass of so many rows."""

    def __init__(self, comm, plan, rows) -> None:
        self.layers, experts, chosen = (getattr(plan.fingerprint, n) for n in ("num_layers", "num_experts", "top_k"))
        buffers = {name: empty(512) for name in ("input_ids", "positions")}
        runner = SimpleNamespace(max_num_reqs=512, max_num_tokens=512, **buffers)
        real, shuffler = (
            RealRows(torch.zeros((), dtype=torch.int64, device=GPU)),
            Shuffler(plan, 0, 0, GPU),
        )
        self.shuffle = LayerShuffle(shuffler, comm, real, runner, Slots(), drafts=0)
        tables = [((experts, 2), torch.int16), ((experts, 2), torch.int32), ((experts,), torch.int16)]
        copies = RankCopies(*(empty(*shape, dtype=kind) for shape, kind in tables), comm.rank, comm.size)
        self.traffic = TrafficCounter(comm.size, comm.rank, GPU)
        self.routers = [
            RoutedLayer(place, copies, experts // 2, real, self.traffic, False, self.observe)
            for place in range(self.layers)
        ]
        mine = -(-rows // comm.size)
        self.hidden, self.residual = (empty(rows, 64, dtype=torch.bfloat16) for _ in range(2))
        self.ids, self.weights = (empty(mine, chosen, dtype=kind) for kind in (torch.int32, torch.float32))

    def observe(self, place, ids, weights) -> None:
        self.shuffle.observe(ids, weights)

    def __call__(self) -> None:
        for place, router in enumerate(self.routers):
            rows, residual = self.shuffle._normalise(lambda *both: both, place, self.hidden, self.residual)
            router.routed(self.weights, self.ids)
            router.to_physical(self.ids)
            assert self.shuffle.restore(rows + residual).shape == self.hidden.shape


def empty(*shape, dtype=torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


def test_a_decode_pass_stays_on_the_device(plans, monkeypatch):
    monkeypatch.setattr(kernels, "of", lambda device: plain)  # vLLM's environment on a CPU has no Triton
    plan = load_plan(plans["tp2"])
    with fake_ranks(0, 2) as comm, on_gpu():
        for rows in SIZES[::3]:
            assert len(replays(Captured(comm, plan, rows))) > 100


@pytest.mark.parametrize(
    ("mode", "drafts", "refused"),
    [("NONE", 2, ""), ("FULL_DECODE_ONLY", 0, ""), ("FULL_DECODE_ONLY", 2, "--enforce-eager"),
     ("FULL", 0, "give FULL_DECODE_ONLY"), ("PIECEWISE", 0, "give FULL_DECODE_ONLY")],
)  # fmt: skip
def test_graphs_that_would_hold_rows_of_prompts_are_refused(mode, drafts, refused):
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_graphs(CUDAGraphMode[mode], drafts)


def test_a_preempted_request_gives_its_slot_to_another():
    slots = Slots(most=2)
    assert slots.take(["a", "b"]).tolist() == [0, 1]
    assert slots.take(["b", "c"]).tolist() == [1, 0]
    slots.release("c")
    assert slots.take(["a"]).tolist() == [0]


def test_routed_experts_are_not_returned_where_tokens_are_split():
    asked = SimpleNamespace(aux_output_config=SimpleNamespace(enable_return_routed_experts=True))
    with pytest.raises(ValueError, match="other tokens' experts where plans split"):
        check_split(SimpleNamespace(vllm_config=asked))
