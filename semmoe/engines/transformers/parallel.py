"""Expert parallelism on a plan, attached from outside to a model that knows nothing of it.

Every decoder layer runs: attention (sharded by heads inside an attention group) -> shuffled reduce-scatter -> MoE on
this rank's rows, experts reached by all-to-all -> shuffled all-gather of the residual stream. In a group of one rank,
attention-DP, both ends fall away. `exchange="all-reduce"` is the usual expert parallelism without all-to-all, the
baseline that attention-TP must beat: every rank computes its own experts for all rows, and two all-reduces join them.
"two-level" is the all-to-all that sends a row once to each node and forwards it there.
"""

from collections import Counter

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from semmoe.core import Plan, require
from semmoe.engines.transformers.attention import shard_attention
from semmoe.engines.transformers.model import decoder_layers, moe_layers
from semmoe.metrics import Traffic, layer_traffic, serving_ranks
from semmoe.runtime.collectives import (
    Communicator,
    ShuffleHandle,
    shuffled_all_gathers,
    shuffled_reduce_scatter,
    timed,
)
from semmoe.runtime.dispatch import (
    Dispatch,
    Levels,
    ReceivedTokens,
    combine,
    combine_parts,
    combine_two_level,
    dispatch_two_level,
)
from semmoe.runtime.tp import TokenShuffler

EXCHANGES = ("all-to-all", "two-level", "all-reduce")


class LocalExperts:
    """This rank's share of one layer's experts: the model's own experts module, cut to the experts held here."""

    def __init__(self, experts: nn.Module, held: np.ndarray) -> None:
        """held: (P / G,) logical ids of this rank's physical experts, in slot order."""
        total = experts.num_experts
        index = torch.from_numpy(held.astype(np.int64))
        for name, parameter in list(experts.named_parameters(recurse=False)):
            require(
                parameter.shape[0] == total, f"parameter {name} of {type(experts).__name__} has no expert dimension"
            )
            setattr(experts, name, nn.Parameter(parameter.data[index.to(parameter.device)], requires_grad=False))
        experts.num_experts = len(held)
        self._compute = experts.forward
        self._local_id = torch.full((total,), -1, dtype=torch.int64)
        self._local_id[index.flip(0)] = torch.arange(len(held)).flip(0)  # the first slot, if a rank holds two copies

    def __call__(self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(M, H), (M, K) logical ids (-1: not here), (M, K) -> (M, H), summed over the choices that are held here."""
        local = torch.where(expert_ids >= 0, self._local_id.to(hidden.device)[expert_ids.clamp(min=0)], -1)
        rows, choices = (local >= 0).nonzero(as_tuple=True)
        out = torch.zeros_like(hidden)
        if len(rows):
            pairs = self._compute(hidden[rows], local[rows, choices][:, None], weights[rows, choices][:, None])
            out.index_add_(0, rows, pairs)
        return out


class ParallelModel:
    """One rank's part of a model: attach with the constructor, then run forwards; `traffic` counts what was routed.

    experts_comm joins all ranks, attention_comm the ranks of this rank's attention group. overlap: own tokens' experts
    run while others' rows are on their way, so that weights are read twice; it pays where the network is slow. levels:
    this rank's place in nodes, for exchange two-level.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Plan, experts_comm: Communicator, attention_comm: Communicator,
        exchange: str = "all-to-all", overlap: bool = False, levels: Levels | None = None,
    ) -> None:  # fmt: skip
        require(exchange in EXCHANGES, f"exchange must be one of {', '.join(EXCHANGES)}, not {exchange!r}")
        topology = plan.topology
        no_dp = exchange != "all-reduce" or topology.dp_size == 1
        require(no_dp, "exchange all-reduce needs attention-TP: ranks with requests of their own share no rows")
        self.model, self.plan = model, plan
        require(exchange == "all-to-all" or not overlap, "overlap needs exchange all-to-all")
        several = topology.num_nodes > 1 or exchange != "two-level"
        require(several, "exchange two-level needs a plan for several nodes (--num-nodes)")
        assert (exchange == "two-level") == (levels is not None)
        self.levels = levels
        self.comm, self.attention_comm, self._overlap = experts_comm, attention_comm, overlap
        group = experts_comm.rank // topology.attn_tp_size
        self.shuffler = TokenShuffler(plan, group, attention_comm.rank)
        self._serving = serving_ranks(plan.placement, topology)  # (L, G, E)
        views = torch.from_numpy(self._serving.astype(np.int64)).to(model.device)
        self._views = views
        self._serving_from_here, self._serving_from_first = views[:, experts_comm.rank], views[:, 0]
        self.traffic = self._no_traffic()
        self.compute_seconds: Counter[str] = Counter()  # of attention and of experts, by the host's clock
        self._rows = torch.zeros(0, dtype=torch.int64)  # (N,) rows of the flat batch that are real
        self._attach(exchange)

    def _attach(self, exchange: str) -> None:
        blocks = moe_layers(self.model)
        physical = self.plan.placement.physical_to_logical_map.reshape(len(blocks), self.comm.size, -1)
        self._experts = [LocalExperts(b.experts, physical[i, self.comm.rank]) for i, b in enumerate(blocks)]
        reduces = exchange == "all-reduce"
        run = self._layer_all_reduce if reduces else self._layer_all_to_all
        exchange_experts = self._expert_all_reduce if reduces else self._expert_all_to_all
        moe_index = {id(block): i for i, block in enumerate(blocks)}
        for layer in decoder_layers(self.model):
            _check_layout(layer)
            shard_attention(layer.self_attn, self.attention_comm.rank, self.attention_comm.size)
            index = moe_index.get(id(layer.mlp))
            layer.forward = _bind(run, layer, index)
            if index is not None:
                layer.mlp.experts.forward = _bind(exchange_experts, index)

    def begin(self, ids: torch.Tensor, real: torch.Tensor, prefill: bool) -> None:
        """Before each forward: the batch's token ids and which of them are real, both (B, S)."""
        self._rows = real.reshape(-1).nonzero(as_tuple=True)[0].to(self.model.device)
        requests = real.nonzero(as_tuple=True)[0].numpy()
        decoding, new = np.full(len(requests), not prefill), np.arange(len(ids) * prefill)
        self.shuffler.start(ids.reshape(-1)[real.reshape(-1)].numpy(), requests, decoding, new)

    def idle(self) -> None:
        """Serve other groups' tokens for one forward in which this group has none of its own."""
        for index in range(len(self._experts)):
            self._serve_others(index)

    def _serve_others(self, index: int) -> None:
        """Take part in one MoE layer's all-to-all with no token of one's own."""
        hidden = torch.zeros(0, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)
        no_ids = torch.zeros(0, self.plan.fingerprint.top_k, dtype=torch.int64, device=hidden.device)
        self._expert_all_to_all(index, hidden, no_ids, no_ids.to(hidden.dtype))

    def _layer_all_to_all(self, layer: nn.Module, index: int | None, hidden_states: torch.Tensor, **kwargs):
        """One decoder layer on a full residual stream (B, S, H), equal on all ranks of the attention group."""
        attended = self._attend(layer, hidden_states, **kwargs)
        residual, partial = self._real(hidden_states), self._real(attended)
        if self.attention_comm.size == 1:
            stream = self._feed_forward(layer, index, residual + partial)
            return self._put_back(hidden_states, stream)
        handle = self.shuffler.slices(index)
        stream = residual[handle.mine] + shuffled_reduce_scatter(self.attention_comm, partial, handle)
        stream = self._feed_forward(layer, index, stream)
        return self._put_back(hidden_states, self._gather(index, stream, handle))

    def _attend(self, layer: nn.Module, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """(B, S, H), this rank's heads' part of the sum."""
        with timed(self.compute_seconds, "attention"):
            return layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]

    def _gather(self, index: int | None, stream: torch.Tensor, handle: ShuffleHandle) -> torch.Tensor:
        """The whole stream. A rank knows the routing of its own slice only: expert ids travel along, and count."""
        if index is None or not self.shuffler.uses_history:
            return shuffled_all_gathers(self.attention_comm, [stream], handle)[0]
        experts = self.shuffler.by_weight(*self._last_routing)
        stream, experts = shuffled_all_gathers(self.attention_comm, [stream, experts], handle)
        self.shuffler.observe(index, experts)
        return stream

    def _feed_forward(self, layer: nn.Module, index: int | None, stream: torch.Tensor) -> torch.Tensor:
        """Post-attention norm, MoE or dense block, residual, on this rank's rows (n, H), n may be 0."""
        if len(stream) == 0:
            if index is not None:
                self._serve_others(index)
            return stream
        out = layer.mlp(layer.post_attention_layernorm(stream)[None])
        out = out[0] if isinstance(out, tuple) else out  # GPT-OSS returns its scores too
        return stream + out.reshape(stream.shape)

    def _expert_all_to_all(self, index: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor):
        """Takes the place of the experts' forward: (n, H), (n, K), (n, K) -> (n, H)."""
        self._last_routing = (expert_ids, weights)
        home = np.full(len(expert_ids), self.comm.rank)
        self._count(index, layer_traffic(expert_ids.cpu().numpy(), home, self._serving[index]))
        if self.levels is not None:
            received, handles = dispatch_two_level(self.levels, hidden, expert_ids, weights, self._views[index])
            return combine_two_level(self.levels, self._compute(index, received), handles)
        targets = self._serving_from_here[index][expert_ids]
        flight = Dispatch(self.comm, hidden, expert_ids, weights, targets)
        if not self._overlap:
            return combine(self.comm, self._compute(index, flight.received()), flight.handle)
        local = self._compute(index, flight.local())
        return combine_parts(self.comm, local, self._compute(index, flight.remote()), flight.handle)

    def _compute(self, index: int, rows: ReceivedTokens) -> torch.Tensor:
        with timed(self.compute_seconds, "experts"):
            return self._experts[index](rows.hidden, rows.expert_ids, rows.weights)

    def _layer_all_reduce(self, layer: nn.Module, index: int | None, hidden_states: torch.Tensor, **kwargs):
        attended = self._attend(layer, hidden_states, **kwargs)
        stream = self._real(hidden_states) + self.attention_comm.all_reduce(self._real(attended))
        return self._put_back(hidden_states, self._feed_forward(layer, index, stream))

    def _expert_all_reduce(self, index: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor):
        serves = self._serving_from_first[index] == self.comm.rank  # one rank's view, so that each expert runs once
        mine = torch.where(serves[expert_ids], expert_ids, -1)
        load = np.zeros(self.comm.size, np.int64)
        load[self.comm.rank] = int((mine >= 0).sum())
        nothing = np.zeros((self.comm.size, self.comm.size), np.int64)
        self._count(index, Traffic(0, 0, 0, nothing, load))
        return self.comm.all_reduce(self._compute(index, ReceivedTokens(hidden, mine, weights)))

    def _count(self, index: int, traffic: Traffic) -> None:
        self.traffic[index] += traffic

    def _no_traffic(self) -> list[Traffic]:
        G = self.comm.size
        return [Traffic(0, 0, 0, np.zeros((G, G), np.int64), np.zeros(G, np.int64)) for _ in self._serving]

    def _real(self, states: torch.Tensor) -> torch.Tensor:
        return states.reshape(-1, states.shape[-1])[self._rows]

    def _put_back(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of padding keep what they had: finite, and read by nobody."""
        flat = states.reshape(-1, states.shape[-1]).clone()
        flat[self._rows] = rows
        return flat.view(states.shape)

    def reset_counts(self) -> None:
        self.traffic = self._no_traffic()
        self.compute_seconds.clear()
        for comm in self._communicators():
            comm.reset_counts()

    def sent_bytes(self) -> Counter[str]:
        """Bytes this rank sent, by kind of collective."""
        return sum((comm.sent for comm in self._communicators()), Counter())

    def collective_seconds(self) -> Counter[str]:
        """Seconds that this rank waited for collectives, by kind."""
        return sum((comm.seconds for comm in self._communicators()), Counter())

    def sent_to(self) -> Counter[int]:
        """Bytes of dispatch and combine that this rank sent to each rank."""
        return self.comm.sent_to if self.levels is None else self.levels.sent_to()

    def _communicators(self) -> list[Communicator]:
        nodes = [] if self.levels is None else [self.levels.inter, self.levels.intra]
        own = [] if self.attention_comm is self.comm else [self.attention_comm]
        return [self.comm, *own, *nodes]


def _bind(function, *leading):
    return lambda *args, **kwargs: function(*leading, *args, **kwargs)


def _check_layout(layer: nn.Module) -> None:
    needed = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    missing = [name for name in needed if not hasattr(layer, name)]
    require(not missing, f"decoder layer {type(layer).__name__} has no {', '.join(missing)}: not supported")
