"""The plug-in inside one of vLLM's model processes, without a plan: it counts and records routing."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.distributed import get_ep_group, get_tp_group
from vllm.platforms import current_platform

from semmoe.engines.absent import NoTraffic
from semmoe.engines.hooks import Replacement
from semmoe.engines.host import Host
from semmoe.engines.step import Pass
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.launch import GATHERS
from semmoe.engines.vllm.model import (
    captures,
    check_eager,
    hook_routers,
    moe_blocks,
    refuse_v2,
    routing_buffer,
    running_topology,
    split_experts,
    split_tokens,
    whole_shared_experts,
    why_unrecorded,
)
from semmoe.engines.vllm.routing import RealRows, RoutedLayer, own_rows
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.shuffle import layers_to_split, split_by_position
from semmoe.engines.vllm.step import Slots, accepted, decodes, fed_tokens, read_step
from semmoe.live.swap import NoSwapper, Swapper, decline
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.traffic import TrafficCounter


class RankPlugin(Host):
    """The hooks of every process, which are configured in processes that load the model."""

    ENGINE = "vLLM"
    VERSION = vllm.__version__
    TRIED = targets.TRIED

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings)
        # Whether an attention group's tokens are split around experts even without data parallelism.
        self.splits_tokens = settings.sequence_parallel == "1" or (self.shuffles and settings.sequence_parallel != "0")
        self._splits_experts = self.splits_tokens
        self._real = RealRows(torch.zeros((), dtype=torch.int64))
        self._routed: list[RoutedLayer] = []
        self._slots = Slots()
        self._in_pass = False
        self._split = 1  # ranks that rows of an attention group are split over by position

    def hooks(self) -> list[Replacement]:
        load = targets.LOAD_MODEL_CPU if current_platform.is_cpu() else targets.LOAD_MODEL
        hooks: list[Replacement] = [
            (load, self._load),
            (targets.LOAD_MODEL_V2, refuse_v2),
            (targets.FORWARD, self._forward),
        ]
        if self._settings.folder is not None or self.shuffles:
            hooks.append((targets.UPDATE, self._update))
        if self._settings.folder is not None:
            hooks.append((targets.SAMPLE, self._sample))
        if self.splits_tokens:
            hooks.append((targets.SEQUENCE_PARALLEL, split_tokens))
        if self._splits_experts:
            hooks += [
                (targets.SPLIT_EXPERTS, split_experts),
                (targets.COLUMNS, whole_shared_experts),
                (targets.ROWS, whole_shared_experts),
            ]
        return hooks

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._guard(lambda: original(runner, *args, **kwargs))
        self._guard(lambda: self._attach(runner))
        return out

    def _attach(self, runner: Any) -> None:
        blocks = moe_blocks(runner.model)
        if not blocks:
            self._without_experts(runner.model)
            return
        group = get_ep_group()
        self._agree(group.cpu_group)
        self._rank = group.rank_in_group
        self._check_model(runner, blocks)
        if str(runner.device) == "cpu":
            check_eager(runner, "semmoe's hooks on a CPU")
        self._real = RealRows(torch.zeros((), dtype=torch.int64, device=runner.device))
        config, layers = runner.vllm_config.parallel_config, sorted(blocks)
        all_to_all = config.enable_expert_parallel and config.use_all2all
        if all_to_all:
            self._split = blocks[layers[0]].moe_config.sp_size
            self._attach_traffic(runner, blocks[layers[0]].moe_config.num_experts)
        self._attach_split(runner, layers)
        if self._settings.folder is not None and get_tp_group().rank_in_group == 0:
            self._attach_recorder(runner, len(layers))
        # Without an all-to-all, which sends rows to chosen ranks, the copy choice is the same for all ranks.
        self._attach_routers(blocks, self._rank if all_to_all else 0)
        if runner.model_config.enforce_eager:  # graphs are replayed without hooks
            self._expect(len(layers))
        if self._settings.folder is not None:
            self.swapper = self._new_swapper(runner, [blocks[layer] for layer in layers])
        self._publish(running_topology(runner, self.num_nodes))

    def _check_model(self, runner: Any, blocks: dict[int, Any]) -> None:
        """Raise ValueError if this model cannot be served on a plan: nothing without one."""

    def _expect(self, num_layers: int) -> None:
        """Say how often hooks must run in the first pass."""
        self._check.expect("routers", num_layers)

    def _new_swapper(self, runner: Any, blocks: Sequence[Any]) -> Swapper | NoSwapper:
        assert self._settings.folder is not None
        return decline(
            "this server runs without a plan: start it on one", get_ep_group().cpu_group, self._settings.folder
        )

    def _attach_traffic(self, runner: Any, physical: int) -> None:
        """Count what the all-to-all sends."""
        group = get_ep_group()
        sent_by = runner.vllm_config.parallel_config.all2all_backend if str(runner.device) != "cpu" else ""
        where = group.world_size, group.rank_in_group
        self._traffic = TrafficCounter(*where, runner.device, sent_by in GATHERS, self.num_nodes)
        manager = getattr(group.device_communicator, "all2all_manager", None)
        if manager is not None and hasattr(manager, "serve"):  # it is semmoe's, as on a CPU
            self.dispatch_comms.append(manager.serve(physical))

    def _attach_split(self, runner: Any, layers: list[int]) -> None:
        """Split the rows of an attention group over its ranks by position, if they are to be split."""
        if self._split > 1 and self._splits_experts:
            for layer in layers_to_split(runner, layers):
                split_by_position(layer)

    def _attach_recorder(self, runner: Any, num_layers: int) -> None:
        buffered = self._settings.record == "1"
        reason = why_unrecorded(self.shuffles, self._split, captures(runner) and not buffered)
        buffer = functools.partial(routing_buffer, runner, self._split)
        self._record(reason, num_layers, str(runner.model_config.model), buffer)

    def _attach_routers(self, blocks: dict[int, Any], source: int) -> None:
        """Hook the routers of all MoE layers; source: the rank whose copy choice is used."""
        layers = sorted(blocks)
        size = blocks[layers[0]].moe_config.num_experts // get_ep_group().world_size
        self._routed = [
            RoutedLayer(place, copies, size, self._real, self._traffic, bool(self.dispatch_comms), self._observe)
            for place, copies in enumerate(self._copies(len(layers), source))
        ]
        unseen = hook_routers([blocks[layer] for layer in layers], self._routed)
        if unseen:
            self._cannot_see(layers[unseen[0]])

    def _copies(self, num_layers: int, source: int) -> Sequence[RankCopies | None]:
        """The physical experts that each layer uses; None: a physical id is the logical id."""
        return [None] * num_layers

    def _cannot_see(self, layer: int) -> None:
        """A layer's kernel routes by itself: nothing is counted."""
        self._traffic = NoTraffic()

    def _observe(self, place: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        if self._check.pending and self._in_pass:
            self._check.ran("routers")
        if self._shuffle.active:
            self._shuffle.observe(expert_ids, weights)
        elif self._recording.hooked and not self.shuffles:  # a pass that is not shuffled has a slice of the rows here
            self._recording.observe(place, expert_ids, weights)

    def _forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps a pass over real tokens; warm-up passes and dummy passes of idle ranks do not call it."""
        if not self._routed:  # a model without experts
            return original(runner, *args, **kwargs)
        count = int(runner.query_start_loc.np[runner.input_batch.num_reqs])
        rows = kwargs.get("positions", args[1] if len(args) > 1 else None)
        padded = count if rows is None else rows.shape[-1]
        self._real.begin(own_rows(count, padded, self._split, get_tp_group().rank_in_group))
        self._in_pass = True
        try:
            with self._parts(Pass(lambda: read_step(runner, self._slots, count), decodes(runner))):
                out = original(runner, *args, **kwargs)
            if self._check.pending:
                self._judge(self._check.verdict() or self._uncounted(int(self._real.count)))
            return out
        finally:
            self._in_pass = False
            self._real.end()

    def _uncounted(self, num_rows: int) -> str:
        """Why counters cannot be trusted after the first pass, where this rank had `num_rows` rows; "" if they can."""
        if not isinstance(self._traffic, TrafficCounter):
            return ""
        counted, wanted = self._traffic.totals().tokens, num_rows * len(self._routed)
        if self._settings.untried and counted != wanted:
            return f"in the first pass {counted} rows were counted of {wanted}"
        return "in the first pass no counter moved" if num_rows > 0 and counted == 0 else ""

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
