"""AutoEP's layers on a plan: experts in the plan's slots, and tokens on the ranks that host most of their experts.

Speculative expert grouping: AutoEP assigns experts to ranks in order. Here they move to the plan's slots, and the
router's logical ids are mapped to physical ones after gating, so that gating, including group limits, is unchanged.

Speculative token shuffling: folded with AutoTP, DeepSpeed sums attention over the group (all-reduce), distributes a
token's expert choices round-robin over the ranks of the group, and gathers every choice's result. Here a token has one
owner, and slices are equal. `predicted`: the plan names the owner before attention's sum, which becomes a shuffled
reduce-scatter; a shuffled all-gather ends the layer. `off`: DeepSpeed's own implementation, which also runs passes with
fewer rows than the plan's `shuffle_from`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.layers import LinearAllreduce, TensorParallel_Layer
from deepspeed.moe.ep_count import count_tokens_per_expert
from deepspeed.moe.ep_tp_dispatch import assignment_ordinals_by_expert
from torch import Tensor, nn
from transformers import PreTrainedModel

from semmoe.core import NEVER, Plan
from semmoe.costs.metrics import Traffic
from semmoe.engines.deepspeed.placement import place_experts
from semmoe.engines.deepspeed.traffic import collectives
from semmoe.engines.transformers.config import architecture_hash
from semmoe.engines.transformers.model import decoder_layers
from semmoe.engines.transformers.planned import PlannedModel, check_layout
from semmoe.runtime.agreement import check_agreement
from semmoe.runtime.collectives import Communicator

SHUFFLES = ("predicted", "off")
NOT_SAVED = ("save_checkpoint", "save_16bit_model")


def apply_plan(model: Any, plan: Plan, *, shuffle: str = "predicted") -> "AutoEPModel":
    """Put a model that AutoEP has converted, or the engine around it, on a plan, for inference.

    Every rank of the expert-parallel group must call it. Afterwards the model's forward and `generate` work as before,
    except that they need token ids as input. If a group of ranks has no batch while others do, it calls `idle` of the
    returned object to take part in their all-to-alls. Raises ValueError for a plan or an engine that does not fit.
    """
    module = getattr(model, "module", model)
    layers = autoep_layers(module)
    # before checks that may fail on a single rank
    check_agreement(layers[0].ep_group, {"the plan": plan, "shuffle": shuffle}, module.device)
    if shuffle not in SHUFFLES:
        raise ValueError(f"shuffle must be one of {', '.join(SHUFFLES)}, not {shuffle!r}")
    if getattr(model, "optimizer", None) is not None:
        raise ValueError(
            "a plan is for inference: this engine has an optimizer, whose state would stay behind when experts move. "
            "To train on a plan, relabel the checkpoint before, with `semmoe apply --to checkpoint`"
        )
    _check_fit(module, layers, plan)
    planned = AutoEPModel(module, plan, layers, shuffle)
    for name in NOT_SAVED:
        if hasattr(model, name):
            setattr(model, name, _refuse_to_save)
    return planned


def autoep_layers(model: PreTrainedModel) -> list[Any]:
    """The AutoEPMoELayers of a model in layer order."""
    layers = [layer.mlp for layer in decoder_layers(model) if isinstance(layer.mlp, AutoEPMoELayer)]
    if not layers or layers[0].ep_group is None:
        raise ValueError(
            "no MoE layer of this model was converted by AutoEP: call deepspeed.initialize with config_for(plan, "
            "model.config) before"
        )
    return layers


def _check_fit(model: PreTrainedModel, layers: list[Any], plan: Plan) -> None:
    topology, first = plan.topology, layers[0]
    if hasattr(first, "_semmoe"):
        raise ValueError("this model is on a plan already")
    if plan.fingerprint.architecture_hash != architecture_hash(model.config):
        raise ValueError(f"this plan was made for {plan.fingerprint.model}, whose architecture is another")
    tp_size = first.folding_group_handles.spec.tp_size if first.folding_group_handles else 1
    if (first.ep_size, tp_size) != (topology.ep_size, topology.attn_tp_size):
        raise ValueError(
            f"the plan is for autoep_size {topology.ep_size} and autotp_size {topology.attn_tp_size}, DeepSpeed runs "
            f"{first.ep_size} and {tp_size}"
        )


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ValueError("this engine's experts have moved to a plan's places, which DeepSpeed's checkpoints do not know")


class AutoEPModel(PlannedModel):
    """One rank's part of a model on a plan; made by `apply_plan`."""

    def __init__(self, model: PreTrainedModel, plan: Plan, layers: list[Any], shuffle: str) -> None:
        served = replace(plan, shuffle_from=NEVER) if shuffle == "off" else plan
        super().__init__(model, served, *_communicators(layers[0]))
        comm = self.comm
        self._comms.append(collectives())
        self._layers, alone = layers, self.attention_comm.size == 1
        # folded AutoEP divides each physical expert's tokens among the ranks of a group, which must agree on them
        static = replace(plan, placement=replace(plan.placement, copy_choice="static"))
        self._own_copies = self._copies_for(static, comm.rank)
        self._held = plan.placement.physical_to_logical_map.reshape(len(layers), comm.size, -1)  # (L, G, P / G)
        self._routers = [layer.router.forward for layer in layers]
        self._told = False  # whether `begin` has announced the next forward
        self.reset_counts()
        for index, layer in enumerate(layers):
            place_experts(comm, layer, self._held[index])
            layer.router.forward = partial(self._route, index)
            layer._semmoe = True
        if shuffle != "off" and not alone:
            self._attach()
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _attach(self) -> None:
        """Replace the forward of decoder layers, so that each rank's experts get its own rows."""
        number = {id(layer): i for i, layer in enumerate(self._layers)}
        for layer in decoder_layers(self.model):
            check_layout(layer)
            index, output = number.get(id(layer.mlp)), layer.self_attn.o_proj
            _require_whole(layer.mlp)
            if not isinstance(output, LinearAllreduce):
                raise ValueError("AutoTP left attention whole: use config_for(plan, model.config)")
            output.forward = partial(self._sum, output, output.forward)
            own = layer.forward, None if index is None else layer.mlp.folding_group_handles
            layer.forward = partial(self._on_path, own, layer, index)

    def _on_path(
        self, own: tuple[Any, Any], layer: nn.Module, index: int | None, hidden_states: Tensor, **kwargs: Any
    ) -> Any:
        """One decoder layer, shuffled or not. own: DeepSpeed's forward, and the groups of folded experts."""
        forward, groups = own
        if index is not None:
            layer.mlp.folding_group_handles = None if self.rows.shuffled else groups  # None: on a rank's own tokens
        if self.rows.shuffled:
            return self._layer_all_to_all(layer, index, hidden_states, **kwargs)
        return forward(hidden_states, **kwargs)

    def _sum(self, output: Any, forward: Any, hidden: Tensor) -> Tensor:
        """Attention's output projection: this rank's partial sums, or, on DeepSpeed's own path, those of all ranks."""
        return _partial_sums(output, self.attention_comm.rank, hidden) if self.rows.shuffled else forward(hidden)

    @property
    def _folded(self) -> bool:
        """Whether DeepSpeed divides the choices of this pass among the ranks of a group."""
        return self.attention_comm.size > 1 and not self.rows.shuffled

    @property
    def traffic(self) -> list[Traffic]:
        return [replace(one, tokens=tokens) for one, tokens in zip(super().traffic, self._tokens, strict=True)]

    def begin(self, ids: Tensor, real: Tensor, prefill: bool) -> None:
        super().begin(ids, real, prefill)
        self._told = True

    def serve_others(self, index: int) -> None:
        self._layers[index](self._no_tokens()[0][None])

    def _look(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Read the token ids of a forward that `begin` did not announce, and from the attention mask which are real."""
        if not self._told:
            ids: Any = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                raise ValueError("a model on a plan needs input_ids: embeddings say nothing of the tokens")
            mask, cache = kwargs.get("attention_mask"), kwargs.get("cache", kwargs.get("past_key_values"))
            real = torch.ones_like(ids, dtype=torch.bool)
            if mask is not None and mask.dim() == 2:
                real = mask[:, -ids.shape[1] :].bool()
            self.begin(ids.cpu(), real.cpu(), cache is None or cache.get_seq_length() == 0)
        self._told = False

    def _route(self, index: int, hidden: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Replaces the router's forward: (T, H) -> weights (T, K), physical ids (T, K), tokens per expert (P,)."""
        weights, experts = self._routers[index](hidden, expert_bias)[:2]
        self.rows.observe(experts, weights)
        placed = (self._own_copies if self._folded else self.copies)[index].to_physical(experts)
        self._count(index, placed)
        return weights, placed, count_tokens_per_expert(placed, self._held[index].size)

    def _count(self, index: int, placed: Tensor) -> None:
        tokens, targets = len(placed), placed // self._held.shape[2]
        if self._folded:
            rank, size = self.attention_comm.rank, self.attention_comm.size
            targets = torch.where(_dealt(placed, rank, size), targets, -1)
            tokens = len(range(rank, tokens, size))
        self._counters[index].count(targets)
        self._tokens[index] += tokens

    def reset_counts(self) -> None:
        super().reset_counts()
        self._tokens = [0] * len(self._layers)


def _communicators(layer: Any) -> tuple[Communicator, Communicator]:
    """The communicators of the ranks that share experts, and of the attention group."""
    import torch.distributed as dist

    experts = Communicator(layer.ep_group, dist.get_rank(layer.ep_group), dist.get_world_size(layer.ep_group))
    if layer.folding_group_handles is None:
        return experts, Communicator(None, 0, 1)
    size = layer.folding_group_handles.spec.tp_size
    attention = Communicator(layer.tp_group, dist.get_rank(layer.tp_group), size)
    if attention.rank != experts.rank % size:
        raise ValueError("ranks of an attention group must be neighbours in the expert group")
    return experts, attention


def _require_whole(feed_forward: nn.Module) -> None:
    cut = [name for name, module in feed_forward.named_modules() if isinstance(module, TensorParallel_Layer)]
    if cut:
        raise ValueError(
            f"AutoTP has cut {', '.join(cut)}: feed-forward layers must be whole where tokens are shuffled "
            "(config_for(plan, model.config) shards attention alone)"
        )


def _partial_sums(output: Any, rank: int, hidden: Tensor) -> Tensor:
    """The output of a row-parallel projection without its final sum over ranks; the first rank adds the bias."""
    return nn.functional.linear(hidden, output.weight, output.bias if rank == 0 else None)


def _dealt(placed: Tensor, rank: int, size: int) -> Tensor:
    """(T, K) bool: choices that folded AutoEP assigns to `rank` of the group, round-robin by expert."""
    order = torch.argsort(placed.flatten(), stable=True)
    mine = torch.zeros(placed.numel(), dtype=torch.bool, device=placed.device)
    mine[order] = assignment_ordinals_by_expert(placed.flatten()[order]) % size == rank
    return mine.view_as(placed)
