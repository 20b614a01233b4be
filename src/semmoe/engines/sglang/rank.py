"""The plug-in inside one of SGLang's model processes, without a plan: it counts and records routing."""

import functools
from typing import Any

import sglang
import torch
from sglang.srt.runtime_context import get_parallel, get_resources

from semmoe.engines import supervisor
from semmoe.engines.hooks import Replacement
from semmoe.engines.host import Host
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import guard, targets
from semmoe.engines.sglang.live import Orders
from semmoe.engines.sglang.model import (
    all_to_all,
    moe_blocks,
    prompts,
    routing_buffer,
    running_topology,
    why_unrecorded,
)
from semmoe.engines.sglang.step import read_step
from semmoe.engines.sglang.weights import load_tied
from semmoe.engines.step import Pass
from semmoe.live.swap import NoSwapper, SwapError, Swapper, decline
from semmoe.runtime.traffic import TrafficCounter


class RankPlugin(Host):
    """The hooks of every process, which are configured in processes that load the model."""

    ENGINE = "SGLang"
    VERSION = sglang.__version__
    TRIED = targets.TRIED

    def __init__(self, settings: PluginSettings) -> None:
        super().__init__(settings)
        self._experts_per_rank = 0
        self._blocks: set[int] = set()  # identities of the model's expert layers; a draft model's are not among them
        self._places: dict[int, int] = {}  # index among the MoE layers by decoder layer, if routing is recorded
        self._logical: dict[int, torch.Tensor] = {}  # by decoder layer: the logical expert of each physical one

    def hooks(self) -> list[Replacement]:
        hooks: list[Replacement] = [
            (targets.GUARD, guard.validate),
            (targets.LOAD_MODEL, self._load),
            (targets.TIED, load_tied),
            (targets.FORWARD, self._forward),
            (targets.ROUTED, self._routed),
            (targets.ROUTED_DEEPEP, self._routed),
            (targets.CAPTURE, self._capture),
        ]
        if self._settings.folder is not None:
            hooks += [(targets.RELEASE, self._release), (targets.SETTINGS, Orders(lambda: self.swapper).handlers)]
        return hooks

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        out = self._guard(lambda: original(runner, *args, **kwargs))
        if not runner.is_draft_worker:
            self._guard(lambda: self._attach(runner))
        return out

    def _attach(self, runner: Any) -> None:
        blocks, group = moe_blocks(runner.model), get_parallel().tp_group.cpu_group
        self._agree(group)
        if not blocks:
            self._without_experts(runner.model)
            return
        self._rank = get_parallel().moe_ep_rank
        self._know(blocks)
        if all_to_all():
            self._attach_traffic(runner, len(blocks))
        self._attach_plan(runner, blocks)
        if self._settings.folder is not None:
            self._attach_recorder(runner, sorted(blocks))
            self.swapper = self._new_swapper(runner, blocks, group)
        self._publish(running_topology(self.num_nodes))

    def _know(self, blocks: dict[int, Any]) -> None:
        """Note the expert layers, which hooks must see in every pass."""
        self._blocks = {id(block) for block in blocks.values()}
        self._experts_per_rank = next(iter(blocks.values())).num_experts // get_parallel().moe_ep_size
        metadata = get_resources().expert_location_metadata
        if metadata is not None:
            self._logical = {layer: metadata.physical_to_logical_map[layer] for layer in blocks}
        self._check.expect("experts", len(blocks))

    def _attach_traffic(self, runner: Any, num_layers: int) -> None:
        """Count what the all-to-all sends."""
        where = get_parallel().moe_ep_size, get_parallel().moe_ep_rank
        self._traffic = TrafficCounter(*where, runner.device, num_nodes=self.num_nodes)
        self._check.expect("counters", num_layers)

    def _attach_plan(self, runner: Any, blocks: dict[int, Any]) -> None:
        """Attach the parts that a plan needs: none without a plan."""

    def _new_swapper(self, runner: Any, blocks: dict[int, Any], group: Any) -> Swapper | NoSwapper:
        assert self._settings.folder is not None
        return decline("this server runs without a plan: start it on one", group, self._settings.folder)

    def _attach_recorder(self, runner: Any, layers: list[int]) -> None:
        """Record on one rank of an attention group."""
        if get_parallel().attn_tp_rank != 0:
            return
        reason = why_unrecorded(self.shuffles, self._settings.record == "1")
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
        judged = self._check.pending and prompts(forward_batch)
        if judged:
            self._check.begin()
        with self._parts(Pass(lambda: read_step(forward_batch), forward_batch.forward_mode.is_decode())):
            out = original(runner, forward_batch, *args, **kwargs)
        self._recording.tell(slice(None))
        if judged:
            self._judge(self._check.verdict())
        self._step_swap()
        return out

    def _step_swap(self) -> None:
        """Step the swap between two passes, on every rank; after a failure SGLang ends and serves no request."""
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
        """Observe the routing of a layer with experts; the layers of a draft model are not the plan's."""
        self._check.ran("experts")
        ids, weights = getattr(topk_output, "topk_ids", None), getattr(topk_output, "topk_weights", None)
        if ids is None:
            return
        if self._traffic.counts:
            self._check.ran("counters")
            self._traffic.count(ids, self._experts_per_rank)
        if self._shuffle.active:
            self._shuffle.observe(ids, weights, self._logical.get(layer))
        elif self._recording.hooked and not self.shuffles:  # a pass that is not shuffled has a slice of the rows here
            self._recording.observe(self._places[layer], ids, weights, self._logical.get(layer))

    def _capture(self, original: Any, capturer: Any, layer_id: int, topk_indices: torch.Tensor) -> Any:
        """Wraps SGLang's capture of routing, which would gather shuffled slices by position."""
        if self._shuffle.active:  # slices are captured once their tokens are in order
            return None
        return original(capturer, layer_id=layer_id, topk_indices=topk_indices.to(torch.int32))
