"""The plug-in inside one of SGLang's model processes."""

import functools
from typing import Any

import sglang
import torch
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
    cuda_graph_fully_disabled,
)
from sglang.srt.runtime_context import get_exec, get_parallel, get_resources, get_spec

from semmoe.core import Plan
from semmoe.engines import supervisor
from semmoe.engines.host import Host, check_same_plan
from semmoe.engines.sglang import guard, targets
from semmoe.engines.sglang.families import expert_sizes, with_copies
from semmoe.engines.sglang.live import LiveExperts, Orders
from semmoe.engines.sglang.location import ChosenCopies, check_dispatch, check_location
from semmoe.engines.sglang.model import (
    all_to_all,
    capture,
    layer_of_norm,
    moe_blocks,
    peer_buffers,
    prompts,
    routing_buffer,
    running_topology,
    why_unrecorded,
)
from semmoe.engines.sglang.registry import around
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.step import read_step
from semmoe.engines.sglang.weights import load_tied, placed_only
from semmoe.live.swap import SwapError, attach
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler
from semmoe.runtime.traffic import TrafficCounter


class RankPlugin(Host):
    """The hooks of every process, which are configured in processes that load the model."""

    def __init__(self, plan: Plan | None, settings: SglangSettings) -> None:
        super().__init__(plan, settings, "SGLang", sglang.__version__, targets.TRIED)
        self._fused = settings.fused == "1"
        if self._fused and not self.shuffles:
            raise ValueError("SEMMOE_FUSED=1 needs a plan that shuffles tokens, as those for attention-TP do")
        self._copies = ChosenCopies()
        self._experts_per_rank = 0
        self._blocks: set[int] = set()  # identities of the model's expert layers; a draft model's are not among them
        self._places: dict[int, int] = {}  # index among the MoE layers by decoder layer, if routing is recorded
        self._logical: dict[int, torch.Tensor] = {}  # by decoder layer: the logical expert of each physical one

    def register(self) -> None:
        around(targets.GUARD, guard.validate)
        around(targets.LOAD_MODEL, self._load)
        around(targets.TIED, load_tied)
        around(targets.FORWARD, self._forward)
        for target in (targets.ROUTED, targets.ROUTED_DEEPEP):
            around(target, self._routed)
        around(targets.CAPTURE, self._capture)
        if self._plan is not None:
            around(targets.NEW_WEIGHTS, placed_only)
            around(targets.EXPERT_SIZES, expert_sizes)
            around(targets.EXPERT_LAYER, with_copies)
            around(targets.COPIES, self._copies.choose)
        if self._settings.folder is not None:
            around(targets.RELEASE, self._release)
            around(targets.SETTINGS, Orders(lambda: self.swapper).handlers)
        if self.shuffles:
            around(targets.REDUCE_SCATTER, self._hooked("before_experts"))
            around(targets.GATHER, self._hooked("before_attention"))
            around(targets.LAST_GATHER, self._hooked("after_last"))
            around(targets.PADDING, self._padding)

    def _hooked(self, name: str) -> Any:
        """A hook that calls a method of the shuffle, which the model process makes later."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._shuffle, name)(original, *args, **kwargs)

        return call

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(runner, *args, **kwargs)
        if not runner.is_draft_worker:
            self._guard(lambda: self._attach(runner))
        return out

    def _attach(self, runner: Any) -> None:
        parallel, blocks = get_parallel(), moe_blocks(runner.model)
        check_same_plan(parallel.tp_group.cpu_group, self._plan, self._settings)
        layers = sorted(blocks)
        if not layers:
            if self._plan is not None:
                raise ValueError(f"{type(runner.model).__name__} has no MoE layer that semmoe knows")
            return
        self._rank = parallel.moe_ep_rank
        self._blocks = {id(block) for block in blocks.values()}
        physical = blocks[layers[0]].num_experts
        self._experts_per_rank = physical // parallel.moe_ep_size
        metadata = get_resources().expert_location_metadata
        for layer in layers if metadata is not None else []:
            self._logical[layer] = metadata.physical_to_logical_map[layer]
        self._check.expect("experts", len(layers))
        if all_to_all():
            nodes = running_topology(self._plan).num_nodes
            self._traffic = TrafficCounter(parallel.moe_ep_size, parallel.moe_ep_rank, runner.device, num_nodes=nodes)
            self._check.expect("counters", len(layers))
        if self._plan is not None:
            config, sizes = runner.model_config, (len(layers), physical)
            running = running_topology(self._plan)
            self._check_plan(self._plan, running, config.hf_text_config, sizes, str(config.model_path))
            if get_exec().moe.enable_eplb:
                raise ValueError("--enable-eplb would move the plan's experts: omit it")
            check_location(self._plan, metadata, layers)
            check_dispatch(self._plan, get_exec().moe.ep_dispatch_algorithm)
            self._copies.attach(self._plan, metadata, layers, parallel.moe_ep_rank)
        if self._plan is not None and self.shuffles:
            self._attach_shuffle(self._plan, runner, layers)
        if self._settings.folder is not None and parallel.attn_tp_rank == 0:
            self._attach_recorder(runner, layers)
        self._attach_swapper(runner, blocks)
        self._publish(running_topology(self._plan), fused=str(self._fused).lower())

    def _attach_swapper(self, runner: Any, blocks: dict[int, Any]) -> None:
        """Let the plan be swapped, if there is one and a folder where others may be staged."""
        plan, folder, captured = self._plan, self._settings.folder, not cuda_graph_fully_disabled()
        if folder is None:
            return
        shuffles = isinstance(self._shuffle, BoundaryShuffle)
        held = "captured graphs hold the token tables: serve with --disable-cuda-graph" if captured and shuffles else ""
        experts = None
        if plan is not None and not held:
            experts = LiveExperts(runner, blocks, self._copies, self._shuffle, captured)
        self.swapper = attach(plan, experts, held, get_parallel().tp_group.cpu_group, folder)

    def _new_shuffler(self, runner: Any, plan: Plan) -> Shuffler:
        parallel = get_parallel()
        group = parallel.moe_ep_rank // plan.topology.attn_tp_size
        granularity = self._settings.shuffle
        return Shuffler(self._settings.served(plan), group, parallel.attn_tp_rank, granularity, runner.device)

    def _attach_shuffle(self, plan: Plan, runner: Any, layers: list[int]) -> None:
        if not all_to_all():
            raise ValueError(
                "tokens are shuffled around an expert all-to-all: give --moe-a2a-backend, or SEMMOE_SHUFFLE=off"
            )
        if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
            raise ValueError(
                "passes over prompts in CUDA graphs are not "
                "shuffled: give --cuda-graph-backend-prefill disabled, or SEMMOE_SHUFFLE=off"
            )
        parallel = get_parallel()
        comm = Communicator(parallel.attn_tp_group.device_group, parallel.attn_tp_rank, parallel.attn_tp_size)
        norms, shuffler = layer_of_norm(runner.model, layers), self._new_shuffler(runner, plan)
        pool = lambda: len(runner.req_to_token_pool.req_to_token)  # noqa: E731
        buffers = peer_buffers(plan, runner, comm) if self._fused else None
        shuffle = BoundaryShuffle(shuffler, comm, norms, pool, buffers)
        self._shuffle, shuffle.ran = shuffle, self._check.ran
        shuffle.make = functools.partial(self._new_shuffler, runner)
        self._check.expect("scatter", len(layers))
        self._check.expect("restore", len(layers))
        if get_spec().speculative_algorithm and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            self._degrade("passes that verify a draft are not shuffled in CUDA graphs: give --disable-cuda-graph")
        if get_exec().features.enable_return_routed_experts:
            shuffle.captured = lambda layer, ids: capture(layers[layer], ids)

    def _attach_recorder(self, runner: Any, layers: list[int]) -> None:
        reason = why_unrecorded(self._settings.shuffle if self.shuffles else "", self._settings.record == "1")
        path = str(runner.model_config.model_path)
        if self._record(reason, len(layers), path, functools.partial(routing_buffer, runner)):
            self._places = {layer: place for place, layer in enumerate(layers)}

    def _release(self, original: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps SGLang's release of a request's cache, at its end and when it is preempted."""
        if req.finished():
            fed = len(req.origin_input_ids) + len(req.output_ids) - 1
            self._recording.finish(req.rid, req.origin_input_ids, fed)
        return original(req, *args, **kwargs)

    def _forward(self, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.is_draft_worker or not self._blocks:
            return original(runner, forward_batch, *args, **kwargs)
        read = functools.cache(lambda: read_step(forward_batch))  # waits for the device
        self._shuffle.begin_pass(forward_batch, read)
        self._recording.begin(read)
        judged = self._check.pending and prompts(forward_batch)
        if judged:
            self._check.begin()
        try:
            out = original(runner, forward_batch, *args, **kwargs)
        finally:
            self._shuffle.end()
            self._recording.end()
        if judged:
            self._degrade(self._check.verdict())
        self._step_swap()
        return out

    def _step_swap(self) -> None:
        """Between two passes, on all ranks alike. After a failure nothing may be served: SGLang ends with an error."""
        try:
            self.swapper.step()
        except SwapError as error:
            supervisor.report(self._settings.folder, str(error))
            raise

    def _routed(self, original: Any, block: Any, hidden_states: torch.Tensor, topk_output: Any, *args, **kwargs) -> Any:
        if id(block) in self._blocks:
            self._see(block.layer_id, topk_output)
        return original(block, hidden_states, topk_output, *args, **kwargs)

    def _see(self, layer: int, topk_output: Any) -> None:
        """Observe the routing of one of the model's expert layers; those of a draft model are not the plan's."""
        self._check.ran("experts")
        ids, weights = getattr(topk_output, "topk_ids", None), getattr(topk_output, "topk_weights", None)
        if ids is None:
            return
        if self._traffic.counts:
            self._check.ran("counters")
            self._traffic.count(ids, self._experts_per_rank)
        if self._shuffle.active:
            self._shuffle.observe(self._to_logical(layer, ids), weights)
        elif self._recording.hooked and not self.shuffles:  # a pass that is not shuffled has a slice of the rows here
            self._recording.observe(self._places[layer], self._to_logical(layer, ids), weights)

    def _to_logical(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        return self._logical[layer][ids.long()] if layer in self._logical else ids.long()

    def _capture(self, original: Any, capturer: Any, layer_id: int, topk_indices: torch.Tensor) -> Any:
        """Wraps SGLang's capture of routing, which would gather shuffled slices by position."""
        if self._shuffle.active:  # slices are captured once their tokens are in order
            return None
        return original(capturer, layer_id=layer_id, topk_indices=topk_indices.to(torch.int32))

    def _padding(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound, info = original(*args, **kwargs)
        return self._shuffle.bound(bound), info
