"""The plug-in inside one of vLLM's model processes."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import vllm
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from semmoe.core import Fingerprint, Plan, Topology
from semmoe.engines import supervisor
from semmoe.engines.counters import Reading
from semmoe.engines.placement import dispatch_map
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
from semmoe.engines.recording import Listener, PassRecorder
from semmoe.engines.selfcheck import SelfCheck
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.launch import GATHERS, gathers
from semmoe.engines.vllm.placement import PlacedExperts, refuse_reload, unpacked
from semmoe.engines.vllm.registry import around
from semmoe.engines.vllm.routing import RealRows, RoutedLayer
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.shuffle import LayerShuffle, moe_layers, split_by_position
from semmoe.engines.vllm.step import Slots, accepted, fed_tokens, read_step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import TokenShuffler
from semmoe.runtime.traffic import TrafficCounter

log = logging.getLogger(__name__)


class RankPlugin:
    """What is hooked in every process, and is set up in those that load the model."""

    def __init__(self, plan: Plan | None, settings: VllmSettings) -> None:
        self._plan, self._settings = plan, settings
        self._placed = PlacedExperts(plan) if plan else None
        self._shuffle: LayerShuffle | None = None
        self._recording: PassRecorder | None = None
        self._traffic: TrafficCounter | None = None
        self._dispatch: list[Communicator] = []  # of the CPU's all-to-all
        self._ep_rank = 0
        self._real: RealRows | None = None
        self._slots = Slots()
        self._check_hooks = SelfCheck()
        self._in_pass = False
        self._split = 1  # ranks that rows of an attention group are split over by position

    @property
    def shuffles(self) -> bool:
        """Whether tokens are to go where the plan says."""
        tables = self._plan is not None and self._plan.tokens.by_tables
        return tables and self._settings.shuffle != "off"

    @property
    def _schedules(self) -> bool:
        """Whether requests are to go where the plan says."""
        follows = self._plan is not None and self._plan.requests.by_tables
        return follows and self._settings.schedule == "plan"

    @property
    def splits_tokens(self) -> bool:
        """Whether an attention group's tokens are split around experts even without data parallelism."""
        return self._settings.sequence_parallel == "1" or (self.shuffles and self._settings.sequence_parallel != "0")

    def register(self, on_cpu: bool) -> None:
        around(targets.LOAD_MODEL_CPU if on_cpu else targets.LOAD_MODEL, self._load)
        around(targets.LOAD_MODEL_V2, _refuse_v2)
        around(targets.FORWARD, self._forward)
        if self._settings.folder is not None or self.shuffles:
            around(targets.UPDATE, self._update)
        if self._settings.folder is not None:
            around(targets.SAMPLE, self._sample)
        if self._placed is not None:
            around(targets.EXPERT_COUNTS, self._placed.counts)
            around(targets.EXPERTS, self._made)
            around(targets.WEIGHTS, self._placed.load)
            around(targets.RELOAD, refuse_reload)
            around(targets.GPT_OSS_WEIGHTS, self._placed.load_unpacked)
            around(targets.GPT_OSS_PACKED, unpacked)
        if self.splits_tokens:
            around(targets.SEQUENCE_PARALLEL, _split_tokens)
        if self.splits_tokens or self._plan is not None:
            around(targets.SPLIT_EXPERTS, _split_experts)
            for linear in (targets.COLUMNS, targets.ROWS):
                around(linear, _whole_shared_experts)

    def _made(self, original: Any, experts: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:
        assert self._placed is not None
        self._placed.made(layer_name)
        original(experts, layer_name, *args, **kwargs)

    def _load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            out = original(runner, *args, **kwargs)
            self._attach(runner)
        except ValueError as error:
            log.critical("semmoe: %s; vLLM does not start", error)
            supervisor.report(self._settings.folder, str(error))
            raise
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
        self._ep_rank = group.rank_in_group
        physical, all_to_all = (
            blocks[layers[0]].moe_config.num_experts,
            config.enable_expert_parallel and config.use_all2all,
        )
        if self._plan is not None:
            self._check(runner, len(layers), physical)
        if str(runner.device) == "cpu":
            check_eager(runner, "semmoe's hooks on a CPU")
        self._real = RealRows(torch.zeros((), dtype=torch.int64, device=runner.device))
        if all_to_all:
            sent_by = config.all2all_backend if str(runner.device) != "cpu" else ""  # on a CPU it is semmoe's
            self._traffic = TrafficCounter(
                group.world_size, group.rank_in_group, runner.device, gathers=sent_by in GATHERS
            )
            if self._plan is not None and sent_by in GATHERS:
                self._degrade(gathers(sent_by))
            self._split = blocks[layers[0]].moe_config.sp_size
            manager = getattr(group.device_communicator, "all2all_manager", None)
            if str(runner.device) == "cpu" and manager is not None:
                self._dispatch.append(manager.serve(physical))
        if self.shuffles and self._split <= 1:
            raise ValueError("tokens are not split here: set SEMMOE_SHUFFLE=off")
        if self._split > 1 and (self.splits_tokens or self._plan is not None):
            self._attach_split(runner, layers)
        if self._settings.folder is not None and get_tp_group().rank_in_group == 0:
            self._attach_recorder(runner, len(layers), all_to_all)
        self._attach_routers(blocks, layers, group.rank_in_group if all_to_all else 0)
        if runner.model_config.enforce_eager:  # graphs are replayed without hooks
            self._check_hooks.expect("routers", len(layers))
            if self._shuffle is not None:
                self._check_hooks.expect("shuffled layers", len(layers))
                self._shuffle.ran = functools.partial(self._check_hooks.ran, "shuffled layers")
        self._publish(running_topology(runner, self._plan))

    def _degrade(self, reason: str) -> None:
        if reason:
            log.warning("semmoe: %s", self._check_hooks.degrade(reason) or reason)

    def _check(self, runner: Any, num_layers: int, physical: int) -> None:
        assert self._plan is not None
        assert self._placed is not None
        config, model = runner.vllm_config.parallel_config, runner.model_config
        if not config.enable_expert_parallel:
            raise ValueError("a plan needs --enable-expert-parallel")
        elsewhere = config.data_parallel_external_lb or config.data_parallel_hybrid_lb
        if elsewhere and self._schedules:
            raise ValueError(
                "another load balancer than vLLM's own chooses ranks, and the "
                "plan schedules no request: set SEMMOE_SCHEDULE=engine"
            )
        if runner.vllm_config.weight_transfer_config is not None:
            raise ValueError(
                "weights cannot be loaded again into an engine on a plan: leave --weight-transfer-config away"
            )
        if config.enable_eplb:
            raise ValueError("--enable-eplb would move the plan's experts: leave it away")
        if config.pipeline_parallel_size != 1:
            raise ValueError("a plan cannot be served with pipeline parallelism")
        split = config.tensor_parallel_size == 1 or config.data_parallel_size == 1 or config.use_sequence_parallel_moe
        if not split:
            raise ValueError(
                f"--all2all-backend {config.all2all_backend} sends the tokens of an attention group many times"
            )
        topology = running_topology(runner, self._plan)
        check_plan(self._plan, "vLLM", topology, model.hf_text_config, num_layers, physical)
        if self._ep_rank == 0:
            check_identity(self._plan, str(model.model))
        self._placed.check()

    def _attach_split(self, runner: Any, layers: list[int]) -> None:
        """The rows of an attention group go where the plan says, or by position."""
        found, name = moe_layers(runner.model), type(runner.model).__name__
        if sorted(found) != layers:
            raise ValueError(
                f"{name}: tokens can be split at {len(found)} of its {len(layers)} MoE layers "
                "only; set SEMMOE_SHUFFLE=off"
            )
        draft = getattr(getattr(runner, "drafter", None), "model", None)
        dense = not isinstance(draft, torch.nn.Module) or not moe_blocks(draft)
        if not dense:
            raise ValueError(
                "a draft model with experts cannot run where a plan splits tokens: choose another way to "
                "speculate, or attention dp"
            )
        if not self.shuffles:
            for layer in found.values():
                split_by_position(layer)
            return
        check_eager(runner, "tokens are shuffled between vLLM's operators, which")
        self._shuffle = self._new_shuffle(runner.vllm_config)
        for place, index in enumerate(layers):
            self._shuffle.hook(found[index], place)

    def _new_shuffle(self, config: Any) -> LayerShuffle:
        assert self._plan is not None
        assert self._real is not None
        group = get_tp_group()
        dp_rank, speculation = config.parallel_config.data_parallel_rank, config.speculative_config
        shuffler = TokenShuffler(self._plan, dp_rank, group.rank_in_group, self._settings.shuffle)
        comm = Communicator(group.device_group, group.rank_in_group, group.world_size)
        drafts = speculation.num_speculative_tokens if speculation is not None else 0
        return LayerShuffle(shuffler, comm, self._real, drafts)

    def _attach_recorder(self, runner: Any, num_layers: int, all_to_all: bool) -> None:
        """Where this rank sees every row of its attention group; elsewhere the log says why not."""
        reason = ""
        if self._shuffle is not None and self._settings.shuffle != "layer":
            reason = "tokens shuffled once a batch carry no routing along"
        elif self._shuffle is None and self._split > 1:
            reason = (
                "each rank of an attention-TP group sees a slice of the tokens; serve on a plan, which shuffles them"
            )
        if reason:
            log.info("semmoe: no `semmoe record` here: %s", reason)
            return
        assert self._settings.folder is not None
        identity = self._plan.fingerprint if self._plan else fingerprint(runner)
        self.record_to(LiveRecorder(self._settings.folder, identity, self._ep_rank), num_layers)

    def listen(self, runner: Any, listener: Listener) -> None:
        """Tell `listener` of every pass of a runner on one rank, in which nothing else is hooked."""
        check_eager(runner, "routing that is to be seen")
        blocks = moe_blocks(runner.model)
        layers = sorted(blocks)
        if not layers:
            raise ValueError(f"{type(runner.model).__name__} has no MoE layer that semmoe knows")
        self._real = RealRows(torch.zeros((), dtype=torch.int64, device=runner.device))
        self.record_to(listener, len(layers))
        self._attach_routers(blocks, layers, 0)
        runner._model_forward = functools.partial(self._forward, type(runner)._model_forward, runner)
        runner._sample = functools.partial(self._sample, type(runner)._sample, runner)

    def record_to(self, listener: Listener, num_layers: int) -> None:
        self._recording = PassRecorder(listener, num_layers)
        if self._shuffle is not None:
            self._shuffle.routed = self._recording.put

    def _attach_routers(self, blocks: dict[int, Any], layers: list[int], source: int) -> None:
        """source: the rank whose copies serve, one for all ranks where no all-to-all sends rows to them."""
        assert self._real is not None
        experts = blocks[layers[0]].moe_config.num_experts
        serving = dispatch_map(self._plan, source) if self._plan is not None else None
        for place, index in enumerate(layers):
            block = blocks[index]
            refused = block.is_monolithic or not isinstance(block.router, BaseRouter) or block.do_naive_dispatch_combine
            if refused:
                if self._plan is not None:
                    raise ValueError(
                        f"vLLM's expert kernel of layer {index} routes by itself, and no plan can "
                        "be applied: give vLLM a checkpoint made by `semmoe apply`, without --plan"
                    )
                self._traffic = None
                continue
            table = torch.arange(experts) if serving is None else torch.from_numpy(serving[place])
            layer = RoutedLayer(
                place,
                table.to(self._real.count.device),
                experts // get_ep_group().world_size,
                self._real,
                self._traffic,
                bool(self._dispatch),
                self._observe,
            )
            hook_router(block.router, layer)

    def _observe(self, place: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        if self._check_hooks.pending and self._in_pass:
            self._check_hooks.ran("routers")
        if self._shuffle is not None and self._shuffle.active:
            own = slice(self._shuffle.num_rows)
            self._shuffle.observe(expert_ids[own].long(), weights[own])
        elif self._recording is not None and self._recording.recording:
            self._recording.observe(place, expert_ids.long(), weights)

    def _forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a pass over real tokens; what warms up or keeps step with other ranks does not come here."""
        if self._real is None:
            return original(runner, *args, **kwargs)
        count = int(runner.query_start_loc.np[runner.input_batch.num_reqs])
        rows = kwargs.get("positions", args[1] if len(args) > 1 else None)
        self._real.count.fill_(self._own_rows(count, count if rows is None else rows.shape[-1]))
        read = functools.cache(lambda: read_step(runner, self._slots, count))
        if self._shuffle is not None:
            self._shuffle.start(read())
        if self._recording is not None:
            self._recording.begin(read)
        self._in_pass = True
        try:
            out = original(runner, *args, **kwargs)
            if self._check_hooks.pending:
                self._degrade(self._check_hooks.verdict() or self._uncounted(int(self._real.count)))
            return out
        finally:
            self._in_pass = False
            self._real.count.fill_(0)
            if self._shuffle is not None:
                self._shuffle.end()
            if self._recording is not None:
                self._recording.close()

    def _uncounted(self, num_rows: int) -> str:
        """Why counters cannot be trusted after the first pass, in which this rank had so many rows."""
        still = self._traffic is not None and num_rows > 0 and self._traffic.totals()[0] == 0
        return "in the first pass no counter moved" if still else ""

    def _sample(self, original: Any, runner: Any, logits: Any, drafts: Any) -> Any:
        """Around the sampling behind a pass, after which it is known which of its tokens stand."""
        out = original(runner, logits, drafts)
        step = self._recording.waiting if self._recording is not None else None
        if step is not None:
            assert self._recording is not None
            kept: Any = slice(None)
            if drafts is not None:
                kept = accepted(step, drafts.num_draft_tokens, out.sampled_token_ids.cpu().numpy())
            self._recording.tell(kept)
        return out

    def _own_rows(self, count: int, padded: int) -> int:
        """Real rows of this rank's slice by position."""
        if self._split == 1:
            return count
        width = -(-padded // self._split)
        return min(max(count - get_tp_group().rank_in_group * width, 0), width)

    def _update(self, original: Any, runner: Any, scheduler_output: Any) -> Any:
        """Around the runner's look at what the scheduler says: requests that ended are still known here."""
        for request in scheduler_output.finished_req_ids:
            state = runner.requests.get(request)
            if self._recording is not None and state is not None:
                self._recording.finish(request, state.prompt_token_ids or (), fed_tokens(state))
            self._slots.release(request)
        return original(runner, scheduler_output)

    def _publish(self, running: Topology) -> None:
        shuffle = self._settings.shuffle if self._shuffle else "no"
        tell_untried(self._ep_rank, "vllm", vllm.__version__, targets.TRIED)
        labels = description(f"vllm {vllm.__version__}", self._plan, self._settings, running.attention, shuffle)
        publish(self._ep_rank, self._settings.folder, labels, self._readings)

    def _readings(self) -> Iterator[Reading]:
        others = [self._shuffle.comm] if self._shuffle else []
        yield from readings(self._ep_rank, self._traffic, self._dispatch, others)
        yield from self._check_hooks.readings()


def moe_blocks(model: torch.nn.Module) -> dict[int, Any]:
    """vLLM's expert layers by decoder layer."""
    return {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}


def hook_router(router: Any, layer: RoutedLayer) -> None:
    """This router alone: subclasses have a `_compute_routing` of their own."""
    compute = router._compute_routing

    def routing(*args: Any, **kwargs: Any) -> Any:
        weights, expert_ids = compute(*args, **kwargs)
        layer.routed(weights, expert_ids)
        return weights, expert_ids

    router._compute_routing = routing
    router._apply_eplb_mapping = layer.to_physical


def running_topology(runner: Any, plan: Plan | None) -> Topology:
    config = runner.vllm_config.parallel_config
    nodes = plan.topology.num_nodes if plan else 1
    return Topology(ep_size=get_ep_group().world_size, dp_size=config.data_parallel_size, num_nodes=nodes)


def check_eager(runner: Any, what: str) -> None:
    mode = runner.vllm_config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise ValueError(f"{what} cannot be compiled: give --enforce-eager")


def fingerprint(runner: Any) -> Fingerprint:
    from semmoe.engines.transformers.model import fingerprint_of

    return fingerprint_of(str(runner.model_config.model))


def _refuse_v2(original: Any, *args: Any, **kwargs: Any) -> None:
    log.critical("semmoe knows vLLM's first model runner only: set VLLM_USE_V2_MODEL_RUNNER=0; vLLM does not start")
    raise ValueError("semmoe needs VLLM_USE_V2_MODEL_RUNNER=0")


def _split_tokens(original: Any, config: Any) -> bool:
    return original(config) or (config.enable_expert_parallel and config.tensor_parallel_size > 1)


def _split_experts(
    original: Any, tp_size: Any, dp_size: Any, pcp_size: Any, is_sequence_parallel: bool, parallel_config: Any
) -> Any:
    """Of all families: some leave their rows whole even where vLLM splits those of others."""
    split = is_sequence_parallel or parallel_config.use_sequence_parallel_moe
    return original(tp_size, dp_size, pcp_size, split, parallel_config)


def _whole_shared_experts(original: Any, linear: Any, *args: Any, **kwargs: Any) -> None:
    """A rank that computes its own rows only needs all of a shared expert."""
    config = get_current_vllm_config().parallel_config
    if "shared_expert" in kwargs.get("prefix", "") and config.use_sequence_parallel_moe:
        kwargs["disable_tp"] = True
    original(linear, *args, **kwargs)
