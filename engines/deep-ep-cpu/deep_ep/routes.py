"""Where tokens go: pure functions of expert ids (n, K), global, -1 for no choice."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    num_tokens_per_rank: Tensor  # (R,) int32
    num_tokens_per_expert: Tensor  # (E,) int32
    is_token_in_rank: Tensor  # (n, R) bool


def layout(ids: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """How many tokens go to each rank and expert; a token goes to a rank once."""
    inside = one_hot(owners(ids, num_experts // num_ranks), num_ranks)
    chosen = torch.bincount(ids[ids >= 0], minlength=num_experts)
    return Layout(inside.sum(0).int(), chosen.int(), inside)


def owners(ids: Tensor, experts_per_rank: int) -> Tensor:
    """The rank of each expert; -1 where there is none."""
    return torch.where(ids >= 0, ids // experts_per_rank, -1)


def one_hot(places: Tensor, size: int) -> Tensor:
    """places (n, K), -1 for none, as (n, size) bool."""
    return (places[:, :, None] == torch.arange(size)).any(dim=1)


def local_ids(ids: Tensor, rank: int, experts_per_rank: int) -> Tensor:
    """The receiver's own numbers of its experts, -1 for all others."""
    mine = owners(ids, experts_per_rank) == rank
    return torch.where(mine, ids - rank * experts_per_rank, -1)


def by_place(inside: Tensor) -> tuple[Tensor, list[int]]:
    """Of (n, P) bool: the tokens of each place one after the other, and how many each has."""
    places, tokens = inside.t().nonzero(as_tuple=True)
    return tokens, torch.bincount(places, minlength=inside.shape[1]).tolist()


def aligned(counts: Tensor, alignment: int) -> Tensor:
    """Rounded up to multiples; an expert without tokens has none."""
    return (counts + alignment - 1) // alignment * alignment
