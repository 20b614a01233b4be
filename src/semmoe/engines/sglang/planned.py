"""The plug-in inside one of SGLang's model processes that serves on a plan."""

import functools
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
    cuda_graph_fully_disabled,
)
from sglang.srt.runtime_context import get_exec, get_parallel, get_resources, get_spec

from semmoe.core import Plan
from semmoe.engines.hooks import Replacement
from semmoe.engines.host import OnPlan
from semmoe.engines.proof import Proof, check_sizes
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import targets
from semmoe.engines.sglang.families import expert_sizes, with_copies
from semmoe.engines.sglang.live import LiveExperts
from semmoe.engines.sglang.location import ChosenCopies, check_dispatch, check_location
from semmoe.engines.sglang.model import (
    all_to_all,
    capture,
    check_attention_dp,
    layer_of_norm,
    moe_blocks,
    running_topology,
)
from semmoe.engines.sglang.rank import RankPlugin
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.weights import again, placed_only, without_plan
from semmoe.live.swap import NoSwapper, Swapper, attach, decline
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler


class PlannedRank(OnPlan, RankPlugin):
    """The hooks of every process: experts where the plan has them, its copies, and its shuffle."""

    def __init__(self, plan: Plan, settings: PluginSettings) -> None:
        super().__init__(plan, settings)
        self._copies = ChosenCopies()
        self._proof = Proof(plan, moe_blocks, lambda: get_parallel().tp_group.cpu_group)

    def hooks(self) -> list[Replacement]:
        hooks: list[Replacement] = [
            *super().hooks(),
            (targets.NEW_WEIGHTS, placed_only),
            (targets.EXPERT_SIZES, functools.partial(expert_sizes, self._settings.untried == "1")),
            (targets.EXPERT_LAYER, with_copies),
            (targets.COPIES, self._seen_choice if self._settings.untried else self._copies.choose),
        ]
        if self.shuffles:
            hooks += [
                (targets.REDUCE_SCATTER, self._hooked("before_experts")),
                (targets.GATHER, self._hooked("before_attention")),
                (targets.LAST_GATHER, self._hooked("after_last")),
                (targets.PADDING, self._padding),
            ]
        if self._settings.untried:
            hooks += [(targets.ALL_WEIGHTS, again), (targets.LOADER, self._proven)]
        return hooks

    def _proven(self, original: Any, model: Any, *args: Any) -> Any:
        """Wraps the loading of a model's weights."""
        return self._proof.load(model, lambda: original(model, *args), without_plan)

    def _seen_choice(self, *call: Any) -> Any:
        """Wraps the choice of physical experts, where the proof expects it at every layer."""
        self._check.ran("physical experts")
        return self._copies.choose(*call)

    def _hooked(self, name: str) -> Any:
        """A hook that calls a method of the shuffle, which the model process makes later."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._shuffle, name)(original, *args, **kwargs)

        return call

    def _padding(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound, info = original(*args, **kwargs)
        return self._shuffle.bound(bound), info

    def _attach_plan(self, runner: Any, blocks: dict[int, Any]) -> None:
        config, layers = runner.model_config, sorted(blocks)
        sizes = len(layers), blocks[layers[0]].num_experts
        self._check_plan(running_topology(self.num_nodes), config.hf_text_config, sizes, str(config.model_path))
        if self._settings.untried:
            self._proof.check()
            self._check.expect("physical experts", len(layers))
            check_sizes([blocks[layer] for layer in layers], "top_k", self.plan)
            check_attention_dp(runner.model, config.hf_text_config.num_attention_heads)
        if get_exec().moe.enable_eplb:
            raise ValueError("--enable-eplb would move the plan's experts: omit it")
        metadata = get_resources().expert_location_metadata
        check_location(self.plan, metadata, layers)
        check_dispatch(self.plan, get_exec().moe.ep_dispatch_algorithm)
        self._copies.attach(self.plan, metadata, layers, get_parallel().moe_ep_rank)
        if self.shuffles:
            self._attach_shuffle(runner, layers)

    def _attach_shuffle(self, runner: Any, layers: list[int]) -> None:
        check_mode()
        parallel = get_parallel()
        comm = Communicator(parallel.attn_tp_group.device_group, parallel.attn_tp_rank, parallel.attn_tp_size)
        norms, shuffler = layer_of_norm(runner.model, layers), self._new_shuffler(runner, self.plan)
        pool = lambda: len(runner.req_to_token_pool.req_to_token)  # noqa: E731
        shuffle = BoundaryShuffle(shuffler, comm, norms, pool)
        self._shuffle, shuffle.ran = shuffle, self._check.ran
        shuffle.make = functools.partial(self._new_shuffler, runner)
        self._check.expect("scatter", len(layers))
        self._check.expect("restore", len(layers))
        if get_spec().speculative_algorithm and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            self._degrade("passes that verify a draft are not shuffled in CUDA graphs: give --disable-cuda-graph")
        if get_exec().features.enable_return_routed_experts:
            shuffle.captured = lambda layer, ids: capture(layers[layer], ids)

    def _new_shuffler(self, runner: Any, plan: Plan) -> Shuffler:
        parallel = get_parallel()
        group = parallel.moe_ep_rank // plan.topology.attn_tp_size
        return Shuffler(self._settings.served(plan), group, parallel.attn_tp_rank, runner.device)

    def _new_swapper(self, runner: Any, blocks: dict[int, Any], group: Any) -> Swapper | NoSwapper:
        folder, captured = self._settings.folder, not cuda_graph_fully_disabled()
        assert folder is not None
        if captured and self.shuffles:
            return decline("captured graphs hold the token tables: serve with --disable-cuda-graph", group, folder)
        experts = LiveExperts(runner, blocks, self._copies, self._shuffle, captured)
        return attach(self.plan, experts, group, folder)


def check_mode() -> None:
    """Raise ValueError if SGLang runs in a mode in which no tokens can be shuffled."""
    if not all_to_all():
        raise ValueError(
            "tokens are shuffled around an expert all-to-all: give --moe-a2a-backend, or SEMMOE_SHUFFLE=off"
        )
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        raise ValueError(
            "passes over prompts in CUDA graphs are not "
            "shuffled: give --cuda-graph-backend-prefill disabled, or SEMMOE_SHUFFLE=off"
        )
