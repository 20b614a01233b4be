"""The plug-in inside one of vLLM's model processes that serves on a plan."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.distributed import get_ep_group

from semmoe.core import Plan
from semmoe.engines.hooks import Replacement
from semmoe.engines.host import OnPlan
from semmoe.engines.proof import Proof, check_routing, check_sizes
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.launch import GATHERS, gathers
from semmoe.engines.vllm.live import LiveExperts
from semmoe.engines.vllm.model import captures, check_eager, check_engine, experts_of, made, running_topology
from semmoe.engines.vllm.placement import PlacedExperts, refuse_reload, unpacked
from semmoe.engines.vllm.rank import RankPlugin
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.shuffle import GRAPHS_HOLD_TABLES, layers_to_split, new_shuffle
from semmoe.live.swap import NoSwapper, Swapper, attach, decline
from semmoe.runtime.copies import RankCopies, rank_copies


class PlannedRank(OnPlan, RankPlugin):
    """The hooks of every process: experts where the plan has them, its copies, and its shuffle."""

    def __init__(self, plan: Plan, settings: VllmSettings) -> None:
        super().__init__(plan, settings)
        self._splits_experts = True
        self._placed = PlacedExperts(plan)
        self._proof = Proof(plan, experts_of, lambda: get_ep_group().cpu_group)

    def hooks(self) -> list[Replacement]:
        return [
            *super().hooks(),
            (targets.EXPERT_COUNTS, self._placed.counts),
            (targets.EXPERTS, functools.partial(made, self._placed)),
            (targets.WEIGHTS, self._placed.load),
            (targets.RELOAD, refuse_reload),
            (targets.GPT_OSS_WEIGHTS, self._placed.load_unpacked),
            (targets.GPT_OSS_PACKED, unpacked),
            *([(targets.LOADER, self._proven)] if self._settings.untried else []),
        ]

    def _proven(self, original: Any, loader: Any, model: Any, *args: Any) -> Any:
        """Wraps the loading of a model's weights."""
        return self._proof.load(model, lambda: original(loader, model, *args), self._placed.without_plan)

    def _check_model(self, runner: Any, blocks: dict[int, Any]) -> None:
        check_engine(runner, self._settings.schedules(self.plan))
        model, sizes = runner.model_config, (len(blocks), next(iter(blocks.values())).moe_config.num_experts)
        self._check_plan(running_topology(runner, self.num_nodes), model.hf_text_config, sizes, str(model.model))
        self._placed.check()
        if self._settings.untried:
            self._proof.check()
            check_sizes([blocks[layer].moe_config for layer in sorted(blocks)], "experts_per_token", self.plan)

    def _expect(self, num_layers: int) -> None:
        super()._expect(num_layers)
        if self.shuffles:
            self._check.expect("shuffled layers", num_layers)

    def _observe(self, place: int, expert_ids: Tensor, weights: Tensor) -> None:
        """Observe a layer's routing; of a family that was never run only if the plan has all of its experts."""
        if self._settings.untried and self._check.pending:
            self._guard(lambda: check_routing(place, expert_ids, self.plan))
        super()._observe(place, expert_ids, weights)

    def _attach_traffic(self, runner: Any, physical: int) -> None:
        super()._attach_traffic(runner, physical)
        backend = runner.vllm_config.parallel_config.all2all_backend
        if str(runner.device) != "cpu" and backend in GATHERS:
            self._degrade(gathers(backend))

    def _attach_split(self, runner: Any, layers: list[int]) -> None:
        """Split the rows of an attention group over its ranks, by the plan or by position."""
        if not self.shuffles:
            super()._attach_split(runner, layers)
            return
        if self._split <= 1:
            raise ValueError("tokens are not split here: set SEMMOE_SHUFFLE=off")
        found = layers_to_split(runner, layers)
        check_eager(runner, "tokens are shuffled between vLLM's operators, which")
        shuffle = new_shuffle(self.plan, runner, self._settings, self._real, self._slots)
        for place, layer in enumerate(found):
            shuffle.hook(layer, place)
        shuffle.ran = self._layer_ran
        self._shuffle = shuffle

    def _layer_ran(self) -> None:
        """Count a layer that a hook has split; passes of idle ranks, which only keep step, prove nothing."""
        if self._in_pass:
            self._check.ran("shuffled layers")

    def _copies(self, num_layers: int, source: int) -> Sequence[RankCopies | None]:
        self._source = source
        return [layer.to(self._real.count.device) for layer in rank_copies(self.plan, source)]

    def _cannot_see(self, layer: int) -> None:
        raise ValueError(
            f"vLLM's expert kernel of layer {layer} routes by itself, and no plan can "
            "be applied: give vLLM a checkpoint made by `semmoe apply`, without --plan"
        )

    def _new_swapper(self, runner: Any, blocks: Sequence[Any]) -> Swapper | NoSwapper:
        group, folder = get_ep_group().cpu_group, self._settings.folder
        assert folder is not None
        if captures(runner) and self.shuffles:
            return decline(GRAPHS_HOLD_TABLES, group, folder)
        captured = not runner.model_config.enforce_eager
        experts = LiveExperts(blocks, self._routed, self._source, self._shuffle, captured)
        return attach(self.plan, experts, group, folder)
