"""A Hugging Face model whose decoder layers run on a plan: the parts that all implementations share.

Every decoder layer runs: attention (sharded by heads inside an attention group) -> shuffled reduce-scatter -> MoE on
this rank's rows, experts reached by all-to-all -> shuffled all-gather of the residual stream. If groups have one rank
(attention-DP) both collectives at the ends are omitted.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from semmoe.core import Plan
from semmoe.costs.metrics import Traffic
from semmoe.engines.layer import TokenRows
from semmoe.engines.step import Step
from semmoe.engines.transformers.model import text_config
from semmoe.runtime.collectives import Communicator, timed
from semmoe.runtime.copies import RankCopies, rank_copies
from semmoe.runtime.shuffler import Shuffler
from semmoe.runtime.traffic import TrafficCounter

# Parts of a decoder layer, each under one of its names.
MIXERS, FEED_FORWARD = ("self_attn", "linear_attn"), ("mlp", "feed_forward", "block_sparse_moe")
NORMS = (("input_layernorm",), ("post_attention_layernorm",))


@dataclass(frozen=True)
class Costs:
    """What one rank routed, sent and waited for since its counts were reset."""

    traffic: list[Traffic]  # of its tokens, by MoE layer
    sent: Counter[str]  # bytes, by kind of collective
    sent_to: Counter[int]  # bytes of dispatch and combine, by receiver
    waited: Counter[str]  # seconds, by kind of collective
    computed: Counter[str]  # seconds, of attention and of experts


class PlannedModel(ABC):
    """One rank's part of a model, to which a subclass attaches itself; call `begin` before every forward.

    experts_comm joins the ranks that share the experts, attention_comm those of this rank's attention group.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Plan, experts_comm: Communicator, attention_comm: Communicator
    ) -> None:
        self.model, self.plan = model, plan
        self.comm, self.attention_comm = experts_comm, attention_comm
        # what counts bytes: communicators, and an engine's own collectives
        self._comms: list[Any] = [experts_comm] if attention_comm is experts_comm else [experts_comm, attention_comm]
        self.copies = self._copies_for(plan, experts_comm.rank)
        group = experts_comm.rank // plan.topology.attn_tp_size
        shuffler = Shuffler(plan, group, attention_comm.rank, model.device)
        self.rows = TokenRows(shuffler, attention_comm, lambda: 1 + len(self._lengths))
        self._lengths = np.zeros(0, np.int64)  # tokens of each request of the batch that were fed so far
        self.compute_seconds: Counter[str] = Counter()  # of attention and of experts, by the host's clock
        self._real_rows = torch.zeros(0, dtype=torch.int64)  # (N,) rows of the flat batch that are real

    def _copies_for(self, plan: Plan, rank: int) -> list[RankCopies]:
        """The copies that the tokens of a rank use, layer by layer."""
        return [copies.to(self.model.device) for copies in rank_copies(plan, rank)]

    @property
    def traffic(self) -> list[Traffic]:
        """Traffic of this rank's tokens by MoE layer, since the counts were reset."""
        return [counter.traffic() for counter in self._counters]

    @abstractmethod
    def serve_others(self, index: int) -> None:
        """Take part in one MoE layer's all-to-all without tokens of this rank."""

    def begin(self, ids: torch.Tensor, real: torch.Tensor, prefill: bool) -> None:
        """Announce a forward: the batch's token ids and the mask of real tokens, both (B, S)."""
        self._real_rows = real.reshape(-1).nonzero(as_tuple=True)[0].to(self.model.device)
        if prefill or len(ids) != len(self._lengths):
            self._lengths = np.zeros(len(ids), np.int64)
        self.rows.begin_step(self._step(ids, real, prefill), self.model.device)

    def _step(self, ids: torch.Tensor, real: torch.Tensor, prefill: bool) -> Step:
        """Read a batch (B, S), of which some tokens are real. Request i has slot i + 1, since 0 is padding."""
        rows = real.nonzero(as_tuple=True)[0].numpy()
        before = self._lengths
        self._lengths = before + real.sum(dim=1).numpy()
        requests, row_of = np.unique(rows, return_inverse=True)
        return Step(
            token_ids=ids[real].numpy(),
            positions=before[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows),
            rows=row_of,
            slots=requests + 1,
            requests=[str(request) for request in requests],
            decoding=np.full(len(rows), not prefill),
        )

    def idle(self) -> None:
        """Compute experts for other groups' tokens during one forward in which this group has no tokens."""
        for index in range(self.plan.fingerprint.num_layers):
            self.serve_others(index)

    def _layer_all_to_all(self, layer: nn.Module, index: int | None, hidden_states: torch.Tensor, **kwargs):
        """One decoder layer on a full residual stream (B, S, H), equal on all ranks of the attention group."""
        attended, passed_on = self._attend(layer, hidden_states, **kwargs)
        partial, residual = self._real(attended), self._real(hidden_states)
        if self.attention_comm.size == 1:
            stream = self._feed_forward(layer, index, residual + partial)
        else:
            attended, residual = self.rows.scatter(partial, residual, index)
            own = slice(int(self.rows.num_real))  # the other rows are padding
            stream = self.rows.restore(self._feed_forward(layer, index, residual[own] + attended[own]))
        return self._returned(hidden_states, stream, passed_on)

    def _attend(self, layer: nn.Module, hidden_states: torch.Tensor, **kwargs) -> tuple[torch.Tensor, tuple]:
        """(B, S, H): the partial attention output of this rank's heads; what the layer returns besides its output."""
        with timed(self.compute_seconds, "attention"):
            out = mixer(layer)(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        attended, *others = out if isinstance(out, tuple) else (out,)
        return attended * getattr(layer, "residual_multiplier", 1), tuple(others[1:])  # others: attention weights, ...

    def _returned(self, states: torch.Tensor, stream: torch.Tensor, passed_on: tuple) -> Any:
        """Return the result of a decoder layer: GLM-5's also passes on the keys that its indexer chose."""
        states = self._put_back(states, stream)
        return (states, *passed_on) if passed_on else states

    def _feed_forward(self, layer: nn.Module, index: int | None, stream: torch.Tensor) -> torch.Tensor:
        """Post-attention norm, MoE or dense block, residual, on this rank's rows (n, H), n may be 0."""
        if len(stream) == 0:
            if index is not None:
                self.serve_others(index)
            return stream
        block = next(child for name, child in layer.named_children() if name in FEED_FORWARD)
        out = block(layer.post_attention_layernorm(stream)[None])
        out = out[0] if isinstance(out, tuple) else out  # GPT-OSS returns its scores too
        return stream + out.reshape(stream.shape) * getattr(layer, "residual_multiplier", 1)

    def _no_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Empty hidden states, expert ids and weights, for a rank without tokens."""
        hidden = torch.zeros(0, text_config(self.model).hidden_size, dtype=self.model.dtype, device=self.model.device)
        ids = torch.zeros(0, self.plan.fingerprint.top_k, dtype=torch.int64, device=hidden.device)
        return hidden, ids, ids.to(hidden.dtype)

    def _real(self, states: torch.Tensor) -> torch.Tensor:
        return states.reshape(-1, states.shape[-1])[self._real_rows]

    def _put_back(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Put rows back into the batch; rows of padding keep their values, which are finite and never read."""
        flat = states.reshape(-1, states.shape[-1]).clone()
        flat[self._real_rows] = rows
        return flat.view(states.shape)

    def reset_counts(self) -> None:
        self.compute_seconds.clear()
        self.rows.passes.clear()
        self._counters = [TrafficCounter(self.comm.size, self.comm.rank, self.model.device) for _ in self.copies]
        for comm in self._comms:
            comm.reset_counts()

    def costs(self) -> Costs:
        sent: Counter[str] = sum((comm.sent for comm in self._comms), Counter())
        sent_to: Counter[int] = sum((comm.sent_to for comm in self._comms), Counter())
        waited: Counter[str] = sum((comm.seconds for comm in self._comms), Counter())
        return Costs(self.traffic, sent, sent_to, waited, self.compute_seconds)


def mixer(layer: nn.Module) -> nn.Module:
    """A decoder layer's attention, or the linear attention in its place."""
    return next(child for name, child in layer.named_children() if name in MIXERS)


def check_layout(layer: nn.Module) -> None:
    """Raise ValueError unless a decoder layer has the known parts and no other, which would be left out."""
    names = {name for name, _ in layer.named_children()}
    for one_of in (MIXERS, FEED_FORWARD, *NORMS):
        if len(names & set(one_of)) != 1:
            raise ValueError(f"decoder layer {type(layer).__name__} has no {' or '.join(one_of)}: not supported")
    unknown = sorted(names - {name for part in (MIXERS, FEED_FORWARD, *NORMS) for name in part})
    if unknown:
        raise ValueError(f"decoder layer {type(layer).__name__} has {', '.join(unknown)} too: not supported")
