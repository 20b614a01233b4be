"""The plug-in inside one of SGLang's model processes."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import sglang
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
    cuda_graph_fully_disabled,
)
from sglang.srt.runtime_context import get_exec, get_parallel, get_resources, get_schedule, get_spec
from sglang.srt.state_capturer.base import BaseTopkCapturer

from semmoe.core import Fingerprint, Plan, Topology
from semmoe.engines import supervisor
from semmoe.engines.counters import Reading
from semmoe.engines.rank import (
    check_identity,
    check_plan,
    check_same_plan,
    description,
    publish,
    readings,
    tell_untried,
)
from semmoe.engines.recorder import LiveRecorder
from semmoe.engines.recorder_files import refuse
from semmoe.engines.recording import PassRecorder
from semmoe.engines.selfcheck import SelfCheck
from semmoe.engines.sglang import guard, targets
from semmoe.engines.sglang.dispatcher import all_to_all
from semmoe.engines.sglang.families import expert_sizes, with_copies
from semmoe.engines.sglang.location import check_dispatch, check_location, choose_copies
from semmoe.engines.sglang.registry import around
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.static import StaticBoundaryShuffle
from semmoe.engines.sglang.step import read_step
from semmoe.engines.sglang.weights import load_tied, placed_only
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers, symmetric_buffers
from semmoe.runtime.shuffler import TokenShuffler
from semmoe.runtime.shuffler_device import DeviceShuffler
from semmoe.runtime.traffic import TrafficCounter

log = logging.getLogger(__name__)

MOST_REQUESTS = 4096  # that SGLang runs at a time where nothing is said
EXPERT_ID_BYTES = 4  # at most, as they travel with the rows


class RankPlugin:
    """What is hooked in every process, and is set up in those that load the model."""

    def __init__(self, plan: Plan | None, settings: SglangSettings) -> None:
        self._plan, self._settings = plan, settings
        if not self.shuffles and settings.fused == "1":
            raise ValueError("SEMMOE_FUSED=1 needs a plan that shuffles tokens, as those for attention-TP do")
        self.dispatch_comms: list[Communicator] = []  # of the CPU's all-to-all, once there is one
        self._shuffle: BoundaryShuffle | None = None
        self._recording: PassRecorder | None = None
        self._traffic: TrafficCounter | None = None
        self._check = SelfCheck()
        self._blocks: set[int] = set()  # identities of the model's expert layers; a draft model's are not among them
        self._experts_per_rank = 0
        self._places: dict[int, int] = {}  # of decoder layers among the MoE layers, where routing is recorded
        self._logical: dict[int, torch.Tensor] = {}  # by decoder layer: the logical expert of each physical one

    @property
    def shuffles(self) -> bool:
        """Whether tokens are to go where the plan says."""
        tables = self._plan is not None and self._plan.tokens.by_tables
        return tables and self._settings.shuffle != "off"

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
        if self._settings.folder is not None:
            around(targets.RELEASE, self._release)
        if self.shuffles:
            around(targets.REDUCE_SCATTER, self._hooked("before_experts"))
            around(targets.GATHER, self._hooked("before_attention"))
            around(targets.LAST_GATHER, self._hooked("after_last"))
            around(targets.PADDING, self._padding)

    def _hooked(self, name: str) -> Any:
        """A method of the shuffle that the model process makes later."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._shuffle is None:
                return original(*args, **kwargs)
            return getattr(self._shuffle, name)(original, *args, **kwargs)

        return call

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(runner, *args, **kwargs)
        if not runner.is_draft_worker:
            try:
                self._attach(runner)
            except ValueError as error:
                log.critical("semmoe: %s; SGLang does not start", error)
                supervisor.report(self._settings.folder, str(error))
                raise
        return out

    def _attach(self, runner: Any) -> None:
        parallel, blocks = get_parallel(), moe_blocks(runner.model)
        check_same_plan(parallel.tp_group.cpu_group, self._plan, self._settings)
        layers = sorted(blocks)
        if not layers:
            if self._plan is not None:
                raise ValueError(f"{type(runner.model).__name__} has no MoE layer that semmoe knows")
            return
        self._blocks = {id(block) for block in blocks.values()}
        physical = blocks[layers[0]].num_experts
        self._experts_per_rank = physical // parallel.moe_ep_size
        metadata = get_resources().expert_location_metadata
        for layer in layers if metadata is not None else []:
            self._logical[layer] = metadata.physical_to_logical_map[layer]
        self._check.expect("experts", len(layers))
        if all_to_all():
            self._traffic = TrafficCounter(parallel.moe_ep_size, parallel.moe_ep_rank, runner.device)
            self._check.expect("counters", len(layers))
        if self._plan is not None:
            config = runner.model_config
            check_plan(self._plan, "SGLang", running_topology(self._plan), config.hf_text_config, len(layers), physical)
            if parallel.moe_ep_rank == 0:
                check_identity(self._plan, str(config.model_path))
            if get_exec().moe.enable_eplb:
                raise ValueError("--enable-eplb would move the plan's experts: leave it away")
            check_location(self._plan, metadata, layers)
            check_dispatch(self._plan, get_exec().moe.ep_dispatch_algorithm)
            choose_copies(self._plan, metadata, layers, parallel.moe_ep_rank)
        if self.shuffles:
            self._attach_shuffle(runner, layers)
        if self._settings.folder is not None and parallel.attn_tp_rank == 0:
            self._attach_recorder(runner, layers)
        self._publish()

    def _attach_shuffle(self, runner: Any, layers: list[int]) -> None:
        assert self._plan is not None
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
        group = parallel.moe_ep_rank // self._plan.topology.attn_tp_size
        norms = layer_of_norm(runner.model, layers)
        where = self._plan, group, parallel.attn_tp_rank, self._settings.shuffle
        if self._static(runner):
            shuffler, pool = DeviceShuffler(*where, runner.device), lambda: len(runner.req_to_token_pool.req_to_token)
            buffers = peer_buffers(self._plan, runner, comm) if self._settings.fused == "1" else None
            self._shuffle = StaticBoundaryShuffle(shuffler, comm, norms, pool, buffers)
        else:
            self._shuffle = BoundaryShuffle(TokenShuffler(*where), comm, norms)
        self._check.expect("scatter", len(layers))
        self._check.expect("restore", len(layers))
        self._shuffle.ran = self._check.ran
        if get_spec().speculative_algorithm and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            tell_degraded(
                self._check.degrade(
                    "passes that verify a draft are not shuffled in CUDA graphs: give --disable-cuda-graph"
                )
            )
        if get_exec().features.enable_return_routed_experts:
            self._shuffle.captured = lambda layer, ids: capture(layers[layer], ids)

    def _static(self, runner: Any) -> bool:
        """Whether tokens are shuffled on the device, where nothing may wait for the host."""
        asked = "1" in (self._settings.static, self._settings.fused)
        return asked or (not self._settings.static and str(runner.device) != "cpu")

    def _attach_recorder(self, runner: Any, layers: list[int]) -> None:
        """Where this rank sees every row of its attention group; elsewhere its status says why not."""
        assert self._settings.folder is not None
        reason = self._cannot_record()
        if reason:
            log.info("semmoe: no `semmoe record` here: %s", reason)
            refuse(self._settings.folder, get_parallel().moe_ep_rank, reason)
            return
        identity = self._plan.fingerprint if self._plan else fingerprint(runner)
        recorder = LiveRecorder(self._settings.folder, identity, get_parallel().moe_ep_rank)
        self._recording = PassRecorder(recorder, len(layers))
        self._places = {layer: place for place, layer in enumerate(layers)}
        if self._shuffle is not None:
            self._shuffle.routed = self._recording.put

    def _cannot_record(self) -> str:
        if get_spec().speculative_algorithm:
            return "with speculative decoding it is not known in a pass which of its tokens are accepted"
        if not cuda_graph_fully_disabled():
            return "passes in CUDA graphs run without the recorder: serve with --disable-cuda-graph"
        if self._shuffle is not None:
            return "" if self._settings.shuffle == "layer" else "tokens shuffled once a batch carry no routing along"
        parallel = get_parallel()
        if all_to_all() and parallel.attn_tp_size > 1:
            return "each rank of an attention-TP group sees a slice of the tokens; serve on a plan, which shuffles them"
        if not all_to_all() and parallel.attn_tp_size < parallel.tp_size:
            return "without an all-to-all a rank sees the rows of other data-parallel ranks too"
        return ""

    def _release(self, original: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around SGLang's release of a request's cache, at its end and where it is preempted."""
        if self._recording is not None and req.finished():
            fed = len(req.origin_input_ids) + len(req.output_ids) - 1
            self._recording.finish(req.rid, req.origin_input_ids, fed)
        return original(req, *args, **kwargs)

    def _forward(self, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.is_draft_worker or not self._blocks:
            return original(runner, forward_batch, *args, **kwargs)
        read = functools.cache(lambda: read_step(forward_batch))  # waits for the device
        if self._shuffle is not None:
            self._shuffle.begin(forward_batch, read)
        if self._recording is not None:
            self._recording.begin(read)
        judged = self._check.pending and prompts(forward_batch)
        if judged:
            self._check.begin()
        try:
            out = original(runner, forward_batch, *args, **kwargs)
        finally:
            for part in (self._shuffle, self._recording):
                if part is not None:
                    part.end()
        if judged:
            tell_degraded(self._check.verdict())
        return out

    def _routed(self, original: Any, block: Any, hidden_states: torch.Tensor, topk_output: Any, *args, **kwargs) -> Any:
        if id(block) in self._blocks:
            self._see(block.layer_id, topk_output)
        return original(block, hidden_states, topk_output, *args, **kwargs)

    def _see(self, layer: int, topk_output: Any) -> None:
        """What one of the model's expert layers was asked for; a draft model's rows are no tokens of the plan's."""
        self._check.ran("experts")
        ids, weights = getattr(topk_output, "topk_ids", None), getattr(topk_output, "topk_weights", None)
        if ids is None:
            return
        if self._traffic is not None:
            self._check.ran("counters")
            self._traffic.count(torch.where(ids >= 0, ids // self._experts_per_rank, -1))
        if self._shuffle is not None and self._shuffle.active:
            self._shuffle.observe(self._to_logical(layer, ids), weights)
        elif self._recording is not None and self._recording.recording:
            self._recording.observe(self._places[layer], self._to_logical(layer, ids), weights)

    def _to_logical(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        return self._logical[layer][ids.long()] if layer in self._logical else ids.long()

    def _capture(self, original: Any, capturer: Any, layer_id: int, topk_indices: torch.Tensor) -> Any:
        """A shuffled slice is captured when its rows are back in the tokens' order, by `BoundaryShuffle`."""
        if self._shuffle is not None and self._shuffle.active:
            return None
        return original(capturer, layer_id=layer_id, topk_indices=topk_indices.to(torch.int32))

    def _padding(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound, info = original(*args, **kwargs)
        return (self._shuffle.bound(bound) if self._shuffle is not None and self._shuffle.active else bound), info

    def _publish(self) -> None:
        rank, folder = get_parallel().moe_ep_rank, self._settings.folder
        how = {"static": isinstance(self._shuffle, StaticBoundaryShuffle), "fused": self._settings.fused == "1"}
        shuffle = self._settings.shuffle if self._shuffle else "no"
        attention = running_topology(self._plan).attention
        tell_untried(rank, "sglang", sglang.__version__, targets.TRIED)
        labels = description(f"sglang {sglang.__version__}", self._plan, self._settings, attention, shuffle)
        publish(rank, folder, labels | {name: str(on).lower() for name, on in how.items()}, self._readings)

    def _readings(self) -> Iterator[Reading]:
        others = [self._shuffle.comm] if self._shuffle else []
        yield from readings(get_parallel().moe_ep_rank, self._traffic, self.dispatch_comms, others)
        yield from self._check.readings()


def tell_degraded(line: str) -> None:
    if line:
        log.warning("semmoe: degraded: %s", line)


def prompts(batch: Any) -> bool:
    """Whether a pass is one over prompts, which is not replayed from a graph as those that decode are."""
    return batch.forward_mode.is_extend_without_speculative() and len(batch.input_ids) > 0


def moe_blocks(model: torch.nn.Module) -> dict[int, Any]:
    """SGLang's expert layers by decoder layer."""
    return {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}


def layer_of_norm(model: torch.nn.Module, layers: list[int]) -> dict[int, int]:
    """The identity of the norm before each decoder layer's feed-forward -> its place among the MoE layers."""
    found = {}
    for module in model.modules():
        boundary: Any = getattr(module, "ffn_boundary", None)
        blocks = moe_blocks(module) if boundary is not None else {}
        if len(blocks) == 1:
            found[id(boundary.norm)] = layers.index(next(iter(blocks)))
    name, number = type(model).__name__, len(layers)
    if len(found) != number:
        raise ValueError(
            f"{name}: tokens can be shuffled at {len(found)} of its {number} MoE layers only; set SEMMOE_SHUFFLE=off"
        )
    return found


def running_topology(plan: Plan | None) -> Topology:
    parallel = get_parallel()
    nodes = plan.topology.num_nodes if plan else 1
    return Topology(ep_size=parallel.moe_ep_size, dp_size=parallel.tp_size // parallel.attn_tp_size, num_nodes=nodes)


def peer_buffers(plan: Plan, runner: Any, comm: Communicator) -> PeerBuffers:
    """Large enough for any pass; raises ValueError where SEMMOE_FUSED=1 cannot be."""
    schedule, config = get_schedule(), runner.model_config
    prompts, requests = schedule.chunked_prefill_size or 0, schedule.max_running_requests or MOST_REQUESTS
    row_bytes = config.hf_text_config.hidden_size * config.dtype.itemsize + EXPERT_ID_BYTES * plan.fingerprint.top_k
    try:
        if prompts <= 0:
            raise ValueError("a pass over prompts has no largest size: give --chunked-prefill-size")
        return symmetric_buffers(comm, runner.device, config.dtype, (prompts + requests + comm.size) * row_bytes)
    except ValueError as error:
        raise ValueError(f"SEMMOE_FUSED=1: {error}") from None


def capture(layer_id: int, expert_ids: torch.Tensor) -> None:
    """(N, K) into SGLang's buffer of routed experts."""
    capturer = get_resources().experts_capturer
    if capturer is not None:
        BaseTopkCapturer.capture(capturer, layer_id, expert_ids.to(torch.int32))


def fingerprint(runner: Any) -> Fingerprint:
    from semmoe.engines.transformers.model import fingerprint_of

    return fingerprint_of(str(runner.model_config.model_path))
