"""The plug-in inside one of vLLM's model processes."""

import functools
from typing import Any

import torch
import vllm
from vllm.distributed import get_ep_group, get_tp_group

from semmoe.core import Plan
from semmoe.engines.absent import NoTraffic
from semmoe.engines.host import Host, check_same_plan
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.launch import GATHERS, gathers
from semmoe.engines.vllm.live import LiveExperts
from semmoe.engines.vllm.model import (
    captures,
    check_eager,
    check_engine,
    check_split,
    made,
    moe_blocks,
    refuse_v2,
    routing_buffer,
    running_topology,
    split_experts,
    split_tokens,
    whole_shared_experts,
    why_unrecorded,
)
from semmoe.engines.vllm.placement import PlacedExperts, refuse_reload, unpacked
from semmoe.engines.vllm.registry import around
from semmoe.engines.vllm.routing import RealRows, own_rows
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.shuffle import (
    GRAPHS_HOLD_TABLES,
    moe_layers,
    new_shuffle,
    split_by_position,
)
from semmoe.engines.vllm.step import Slots, accepted, fed_tokens, read_step
from semmoe.live.recorder.passes import Listener
from semmoe.live.swap import attach
from semmoe.runtime.traffic import TrafficCounter


class RankPlugin(Host):
    """The hooks of every process, which are configured in processes that load the model."""

    def __init__(self, plan: Plan | None, settings: VllmSettings) -> None:
        super().__init__(plan, settings, "vLLM", vllm.__version__, targets.TRIED)
        self._sequence_parallel = settings.sequence_parallel
        self._placed = PlacedExperts(plan) if plan else None
        self._real = RealRows(torch.zeros((), dtype=torch.int64))
        self._attached = False  # whether a model with experts is hooked
        self._slots = Slots()
        self._in_pass = False
        self._split = 1  # ranks that rows of an attention group are split over by position

    @property
    def splits_tokens(self) -> bool:
        """Whether an attention group's tokens are split around experts even without data parallelism."""
        return self._sequence_parallel == "1" or (self.shuffles and self._sequence_parallel != "0")

    def register(self, on_cpu: bool) -> None:
        around(targets.LOAD_MODEL_CPU if on_cpu else targets.LOAD_MODEL, self._load)
        around(targets.LOAD_MODEL_V2, refuse_v2)
        around(targets.FORWARD, self._forward)
        if self._settings.folder is not None or self.shuffles:
            around(targets.UPDATE, self._update)
        if self._settings.folder is not None:
            around(targets.SAMPLE, self._sample)
        if self._placed is not None:
            around(targets.EXPERT_COUNTS, self._placed.counts)
            around(targets.EXPERTS, functools.partial(made, self._placed))
            around(targets.WEIGHTS, self._placed.load)
            around(targets.RELOAD, refuse_reload)
            around(targets.GPT_OSS_WEIGHTS, self._placed.load_unpacked)
            around(targets.GPT_OSS_PACKED, unpacked)
        if self.splits_tokens:
            around(targets.SEQUENCE_PARALLEL, split_tokens)
        if self.splits_tokens or self._plan is not None:
            around(targets.SPLIT_EXPERTS, split_experts)
            for linear in (targets.COLUMNS, targets.ROWS):
                around(linear, whole_shared_experts)

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(runner, *args, **kwargs)
        self._guard(lambda: self._attach(runner))
        return out

    def _attach(self, runner: Any) -> None:
        blocks = moe_blocks(runner.model)
        layers = sorted(blocks)
        if not layers:
            if self._plan is not None:
                raise ValueError(f"{type(runner.model).__name__} has no MoE layer that semmoe knows")
            return
        config, group = runner.vllm_config.parallel_config, get_ep_group()
        check_same_plan(group.cpu_group, self._plan, self._settings)
        self._rank = group.rank_in_group
        physical = blocks[layers[0]].moe_config.num_experts
        all_to_all = config.enable_expert_parallel and config.use_all2all
        if self._placed is not None:
            plan, model = self._placed.plan, runner.model_config
            check_engine(runner, plan, self._settings.schedules(plan))
            sizes = len(layers), physical
            running = running_topology(runner, plan)
            self._check_plan(plan, running, model.hf_text_config, sizes, str(model.model))
            self._placed.check()
        if str(runner.device) == "cpu":
            check_eager(runner, "semmoe's hooks on a CPU")
        self._real, self._attached = RealRows(torch.zeros((), dtype=torch.int64, device=runner.device)), True
        if all_to_all:
            self._split = blocks[layers[0]].moe_config.sp_size
            self._attach_traffic(runner, physical)
        if self.shuffles and self._split <= 1:
            raise ValueError("tokens are not split here: set SEMMOE_SHUFFLE=off")
        if self._split > 1 and (self.splits_tokens or self._plan is not None):
            self._attach_split(runner, layers)
        if self._settings.folder is not None and get_tp_group().rank_in_group == 0:
            self._attach_recorder(runner, len(layers))
        eager = runner.model_config.enforce_eager
        self._attach_routers(blocks, layers, group.rank_in_group if all_to_all else 0, not eager)
        if eager:  # graphs are replayed without hooks
            self._check.expect("routers", len(layers))
            if self.shuffles:
                self._check.expect("shuffled layers", len(layers))
        self._attach_swapper(runner)
        self._publish(running_topology(runner, self._plan))

    def _attach_swapper(self, runner: Any) -> None:
        """Let the plan be swapped, if there is one and a folder where others may be staged."""
        if self._settings.folder is None:
            return
        held = GRAPHS_HOLD_TABLES if captures(runner) and self._shuffle.comms else ""
        self._experts.shuffle = self._shuffle
        experts = None if held else self._experts
        self.swapper = attach(self._plan, experts, held, get_ep_group().cpu_group, self._settings.folder)

    def _attach_traffic(self, runner: Any, physical: int) -> None:
        """Count what the all-to-all sends."""
        group = get_ep_group()
        sent_by = runner.vllm_config.parallel_config.all2all_backend if str(runner.device) != "cpu" else ""
        where, nodes = (group.world_size, group.rank_in_group), running_topology(runner, self._plan).num_nodes
        self._traffic = TrafficCounter(*where, runner.device, sent_by in GATHERS, nodes)
        if self._plan is not None and sent_by in GATHERS:
            self._degrade(gathers(sent_by))
        manager = getattr(group.device_communicator, "all2all_manager", None)
        if manager is not None and hasattr(manager, "serve"):  # it is semmoe's, as on a CPU
            self.dispatch_comms.append(manager.serve(physical))

    def _attach_split(self, runner: Any, layers: list[int]) -> None:
        """Split the rows of an attention group over its ranks, by the plan or by position."""
        found, name = moe_layers(runner.model), type(runner.model).__name__
        if sorted(found) != layers:
            raise ValueError(
                f"{name}: tokens can be split at {len(found)} of its {len(layers)} MoE layers "
                "only; set SEMMOE_SHUFFLE=off"
            )
        check_split(runner)
        if self._plan is None or not self.shuffles:
            for layer in found.values():
                split_by_position(layer)
            return
        check_eager(runner, "tokens are shuffled between vLLM's operators, which")
        shuffle = new_shuffle(self._plan, runner, self._settings, self._real, self._slots)
        for place, index in enumerate(layers):
            shuffle.hook(found[index], place)
        shuffle.ran = self._layer_ran
        self._shuffle = shuffle

    def _attach_recorder(self, runner: Any, num_layers: int) -> None:
        buffered = self._settings.record == "1"
        reason = why_unrecorded(self.shuffles, self._settings.shuffle, self._split, captures(runner) and not buffered)
        buffer = functools.partial(routing_buffer, runner, self._split)
        self._record(reason, num_layers, str(runner.model_config.model), buffer)

    def listen(self, runner: Any, listener: Listener) -> None:
        """Pass every pass of a runner on one rank to `listener`."""
        check_eager(runner, "a model whose routing is recorded")
        blocks = moe_blocks(runner.model)
        layers = sorted(blocks)
        if not layers:
            raise ValueError(f"{type(runner.model).__name__} has no MoE layer that semmoe knows")
        self._real, self._attached = RealRows(torch.zeros((), dtype=torch.int64, device=runner.device)), True
        self._record_to(listener, len(layers))
        self._attach_routers(blocks, layers, 0, False)
        runner._model_forward = functools.partial(self._forward, type(runner)._model_forward, runner)
        runner._sample = functools.partial(self._sample, type(runner)._sample, runner)

    def _attach_routers(self, blocks: dict[int, Any], layers: list[int], source: int, captured: bool) -> None:
        """Hook the routers of all MoE layers; source: the rank whose copy choice is used.

        Without an all-to-all, which sends rows to chosen ranks, it is the same for all ranks.
        """
        self._experts = LiveExperts([blocks[index] for index in layers], source, self._real, captured)
        unseen = self._experts.hook(self._plan, self._traffic, bool(self.dispatch_comms), self._observe)
        if unseen and self._plan is not None:
            raise ValueError(
                f"vLLM's expert kernel of layer {layers[unseen[0]]} routes by itself, and no plan can "
                "be applied: give vLLM a checkpoint made by `semmoe apply`, without --plan"
            )
        if unseen:
            self._traffic = NoTraffic()

    def _layer_ran(self) -> None:
        """Count a layer that a hook has split; passes of idle ranks, which only keep step, prove nothing."""
        if self._in_pass:
            self._check.ran("shuffled layers")

    def _observe(self, place: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        if self._check.pending and self._in_pass:
            self._check.ran("routers")
        if self._shuffle.active:
            self._shuffle.observe(expert_ids.long(), weights)
        elif self._recording.hooked and not self.shuffles:  # a pass that is not shuffled has a slice of the rows here
            self._recording.observe(place, expert_ids.long(), weights)

    def _forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps a pass over real tokens; warm-up passes and dummy passes of idle ranks do not call it."""
        if not self._attached:
            return original(runner, *args, **kwargs)
        count = int(runner.query_start_loc.np[runner.input_batch.num_reqs])
        rows = kwargs.get("positions", args[1] if len(args) > 1 else None)
        read = functools.cache(lambda: read_step(runner, self._slots, count))
        self._shuffle.begin_step(read)
        padded = count if rows is None else rows.shape[-1]
        self._real.begin(own_rows(count, padded, self._split, get_tp_group().rank_in_group))
        self._recording.begin(read)
        self._in_pass = True
        try:
            out = original(runner, *args, **kwargs)
            if self._check.pending:
                self._degrade(self._check.verdict() or self._uncounted(int(self._real.count)))
            return out
        finally:
            self._in_pass = False
            self._real.end()
            self._shuffle.end()
            self._recording.close()

    def _uncounted(self, num_rows: int) -> str:
        """Why counters cannot be trusted after the first pass, where this rank had `num_rows` rows; "" if they can."""
        still = isinstance(self._traffic, TrafficCounter) and num_rows > 0 and self._traffic.totals().tokens == 0
        return "in the first pass no counter moved" if still else ""

    def _sample(self, original: Any, runner: Any, logits: Any, drafts: Any) -> Any:
        """Wraps the sampling after a pass, which decides which of its draft tokens are accepted."""
        out = original(runner, logits, drafts)
        step = self._recording.waiting
        if step is not None:
            kept: Any = slice(None)
            if drafts is not None:
                kept = accepted(step, drafts.num_draft_tokens, out.sampled_token_ids.cpu().numpy())
            self._recording.tell(kept)
        return out

    def _update(self, original: Any, runner: Any, scheduler_output: Any) -> Any:
        """Wraps the runner's update from the scheduler, at which requests that ended are still known."""
        for request in scheduler_output.finished_req_ids:
            state = runner.requests.get(request)
            if state is not None:
                self._recording.finish(request, state.prompt_token_ids or (), fed_tokens(state))
            self._slots.release(request)
        return original(runner, scheduler_output)
