"""Shuffle tokens by a plan's token policy: choose, layer by layer, the rank of an attention-TP group for each row.

Inputs are as long as the padded batch; rows of padding come last and belong to PADDING_SLOT. They score 0 everywhere
and lose nothing by moving, so that they make room for tokens and fill the remaining places: slices are equal, and every
slice has its tokens first. Nothing waits for a GPU, so that an engine may capture its decode passes in a CUDA graph.

Worked example, two slices, scores [9, 1], [5, 4], [7, 0] and one row of padding: all three tokens want slice 0, which
holds two rows; token 1 loses least by moving: [0, 1, 0, 1], and slice 1 is token 1 and the padding.
"""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from semmoe.core import Plan
from semmoe.costs.metrics import majority_rank
from semmoe.paper.policies import PaperTables, assign_slices, device_of_expert, look_up
from semmoe.runtime import kernels
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffle import ShuffleHandle, shuffle_handle, shuffled_all_gather, slice_rows
from semmoe.runtime.tables import Rows, ScoreTables, Turns
from semmoe.tokens.slices import ByPosition, PathScores

PADDING_SLOT = 0  # padding writes to this slot, which is never read
Device: TypeAlias = str | torch.device
Parts: TypeAlias = tuple[Tensor, Tensor]


class Slicer:
    """A token policy during a forward pass, in the same state on all ranks of the group.

    This one knows no history, so that `Shuffler` slices by position, as without a plan; subclasses decide by layer.
    """

    uses_history = False  # whether every rank must be given the routing of all tokens

    def __init__(self, plan: Plan, group: int, device: Device) -> None:
        self._group, self._size = group, plan.topology.attn_tp_size
        self._first = group * self._size  # the group's first rank

    def reserve(self, num_slots: int) -> None:
        """Allocate the state of request slots, PADDING_SLOT included."""

    def start(self, rows: Rows, new_slots: Tensor) -> None:
        """Begin a forward pass. new_slots: slots whose request begins, PADDING_SLOT for none."""

    def slices(self, layer: int, rank: int) -> ShuffleHandle:
        """A rank's handle of the slices at a MoE layer; slices are equal. Called where `uses_history`."""
        raise NotImplementedError

    def gather(self, comm: Communicator, rows: Tensor, expert_ids: Tensor, handle: ShuffleHandle, layer: int) -> Parts:
        """Gather this rank's rows (n, H) and their experts (n, K) by falling weight: (N, H) and (N, K) in order.

        The experts are observed where `uses_history`. Padding has any experts.
        """
        whole, ids = shuffled_all_gather(comm, [rows, expert_ids], handle)
        return whole, ids


class PathSlices(Slicer):
    """Slices by scores from token ids, experts at earlier layers, and experts of the request's earlier tokens."""

    uses_history = True

    def __init__(self, plan: Plan, group: int, device: Device) -> None:
        super().__init__(plan, group, device)
        assert isinstance(plan.tokens, PathScores)
        self._tables = ScoreTables.of(plan.tokens, device)
        self._kernels = kernels.of(self._tables.token_rows.device)
        self._layers, self._top_k = plan.fingerprint.num_layers, plan.fingerprint.top_k
        self._id_type = id_type(plan)

    def reserve(self, num_slots: int) -> None:
        """Allocate the histories of requests."""
        self._states = self._tables.states(num_slots)

    def start(self, rows: Rows, new_slots: Tensor) -> None:
        """Look the tokens up for all layers, and begin the histories of new requests."""
        self._tables.reset(self._states, new_slots)
        self._rows = rows
        shape = self._layers, len(rows.slots), self._top_k
        self._routed = torch.empty(shape, dtype=self._id_type, device=rows.slots.device)  # each layer's, once known
        every = range(self._layers)
        self._looked_up = self._kernels.look_up_tokens(self._tables, every, self._first, self._size, rows.token_ids)

    def slices(self, layer: int, rank: int) -> ShuffleHandle:
        given = self._looked_up, self._routed, self._rows, self._states
        order, inverse, counts = self._kernels.slices(self._tables, layer, self._first, *given)
        return ShuffleHandle(order, inverse, counts, slice_rows(len(inverse), self._size), rank)

    def gather(self, comm: Communicator, rows: Tensor, expert_ids: Tensor, handle: ShuffleHandle, layer: int) -> Parts:
        """Gather rows and experts, which count for later layers and later tokens.

        A pass in which a slot has several tokens is observed after its last layer: their contributions are independent.
        """
        every, turns = (self._rows, self._tables, self._states), self._rows.turns
        gathered = comm.all_gather([rows, expert_ids])
        whole = self._kernels.restore(*gathered, handle.inverse, layer, self._routed, *every)
        if turns is not None and layer == self._layers - 1:
            self._kernels.observe_in_turn(self._tables, self._states, turns, self._routed)
        return whole, self._routed[layer]


class PaperSlices(Slicer):
    """Slices by Algorithm 3, from token ids and the devices of the tokens' experts at earlier layers, on a CPU."""

    uses_history = True

    def __init__(self, plan: Plan, group: int, device: Device) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"a plan of method {plan.method!r} has {plan.tokens.kind}, whose slices are assigned on the host: "
                "solve one by method semmoe"
            )
        super().__init__(plan, group, device)
        assert isinstance(plan.tokens, PaperTables)
        self._tables = plan.tokens
        self._devices_of_expert = device_of_expert(plan.placement, plan.topology)[:, group]  # (L, E)

    def start(self, rows: Rows, new_slots: Tensor) -> None:
        """Begin a forward pass; requests have no effect."""
        self._real, self._token_ids = rows.real, rows.token_ids[rows.real].numpy()
        self._devices: list[np.ndarray] = []  # (B,) devices of the real rows, latest first

    def slices(self, layer: int, rank: int) -> ShuffleHandle:
        """Assign the real rows, and let padding fill the slices."""
        lookback = self._tables.lookback
        history = np.stack(self._devices[:lookback], axis=1) if layer >= lookback else None
        preference = look_up(self._tables, layer, self._group, self._token_ids, history)
        chosen = assign_slices(preference, self._size)
        missing = len(self._real) // self._size - np.bincount(chosen, minlength=self._size)
        slices = torch.from_numpy(np.append(chosen, np.repeat(np.arange(self._size), missing)))
        return shuffle_handle(slices, self._real, self._size, rank)

    def gather(self, comm: Communicator, rows: Tensor, expert_ids: Tensor, handle: ShuffleHandle, layer: int) -> Parts:
        """Gather rows and experts, whose devices count for later layers."""
        whole, every = super().gather(comm, rows, expert_ids, handle, layer)
        ids = every[: len(self._token_ids)].long().numpy()
        self._devices.insert(0, majority_rank(ids, self._devices_of_expert[layer], self._size))
        return whole, every


SLICERS: dict[str, type[Slicer]] = {
    ByPosition.kind: Slicer,
    PathScores.kind: PathSlices,
    PaperTables.kind: PaperSlices,
}


class Shuffler:
    """Decides the slices of an attention group's rows, as handles of shuffled collectives.

    Every rank of the group runs it on the same tokens and so computes the same slices without communication. `reserve`
    allocates the states of requests, `start` begins a forward pass, `slices` decides a layer, `by_weight` and
    `gather` pass on the routing. Raises ValueError for the paper's tables on a GPU.
    """

    def __init__(self, plan: Plan, group: int, rank: int, device: Device) -> None:
        self._slicer = SLICERS[plan.tokens.kind](plan, group, device)
        self._shuffle_from, self._shuffled = plan.shuffle_from, False
        self._id_type = id_type(plan)
        self._size = plan.topology.attn_tp_size
        self._rank = rank

    @property
    def uses_history(self) -> bool:
        """Whether every rank must be given the routing of all tokens."""
        return self._slicer.uses_history

    def shuffles(self, num_rows: int) -> bool:
        """Whether a pass over `num_rows` rows, padding included, is shuffled; else its slices are contiguous."""
        return num_rows >= self._shuffle_from

    def reserve(self, num_slots: int) -> None:
        """Allocate the states of request slots, PADDING_SLOT included; call it before the first pass and any graph."""
        self._slicer.reserve(num_slots)

    def start(self, token_ids: Tensor, slots: Tensor | np.ndarray, decoding: Tensor | None, new_slots: Tensor) -> None:
        """Begin a forward pass over N rows, in the order in which the group shares them, padding last.

        slots (N,): the slot of each row's request. decoding (N,) bool: tokens that the model generated, and slots an
        array; None: all tokens, at most one per request. new_slots: slots whose request begins in this pass,
        PADDING_SLOT for none.
        """
        device, in_turn = token_ids.device, decoding is not None and self.uses_history
        turns = Turns.of(np.asarray(slots), device) if in_turn else None
        on_device = torch.as_tensor(slots, device=device)
        real = on_device != PADDING_SLOT
        self._begin(real, shuffled=True)
        decoding = real if decoding is None else decoding
        self._slicer.start(Rows(token_ids, on_device, real, decoding, turns), new_slots)

    def start_unshuffled(self, real: Tensor) -> None:
        """Begin a pass over rows, of which some are real (N,) bool, in contiguous slices."""
        self._begin(real, shuffled=False)

    def _begin(self, real: Tensor, shuffled: bool) -> None:
        self._real, self._shuffled = real, shuffled
        self._handle: ShuffleHandle | None = None  # of slices that stay the same in this pass

    def slices(self, moe_layer: int | None) -> ShuffleHandle:
        """The handle of a layer's slices: by the policy at MoE layers, by position at dense ones."""
        if self._shuffled and self.uses_history and moe_layer is not None:
            return self._slicer.slices(moe_layer, self._rank)
        if self._handle is None:
            slices = contiguous(self._real, self._size)
            self._handle = shuffle_handle(slices, self._real, self._size, self._rank)
        return self._handle

    def by_weight(self, expert_ids: Tensor, weights: Tensor, logical: Tensor | None = None) -> Tensor:
        """(n, K): the experts of this rank's rows by falling weight, in the form that the all-gather sends.

        logical (P,): the expert of each physical one, where ids are physical.
        """
        return kernels.of(expert_ids.device).by_weight(expert_ids, weights, self._id_type, logical)

    def gather(self, comm: Communicator, rows: Tensor, expert_ids: Tensor, handle: ShuffleHandle, layer: int) -> Parts:
        """Gather rows after a MoE layer, and observe their experts: see `Slicer.gather`."""
        return self._slicer.gather(comm, rows, expert_ids, handle, layer)


def contiguous(rows: Tensor, size: int) -> Tensor:
    """(N,) the slice of each of the rows (N,) by position."""
    return torch.arange(len(rows), device=rows.device) // slice_rows(len(rows), size)


def id_type(plan: Plan) -> torch.dtype:
    """The integer type in which expert ids are sent between ranks: uint8 for at most 256 experts, else int32."""
    return torch.uint8 if plan.fingerprint.num_experts <= 256 else torch.int32
