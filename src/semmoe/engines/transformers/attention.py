"""Shard attention modules by heads: each rank keeps its heads and returns a partial sum of the output."""

import torch
from torch import nn

from semmoe.topology import check_divides, nearest


def shard_attention(attention: nn.Module, rank: int, size: int) -> None:
    """Cut an attention module to the heads of `rank` of `size`; the outputs of all ranks sum to the full output."""
    if size == 1:
        return
    if not hasattr(attention, "o_proj"):
        raise ValueError(f"{type(attention).__name__} has no heads to split: attention-TP is not possible")
    if hasattr(attention, "kv_b_proj"):
        _shard_latent(attention, rank, size)
    else:
        _shard_grouped(attention, rank, size)
    bias = attention.o_proj.bias
    if bias is not None and rank > 0:
        bias.data.zero_()  # the bias is added by one rank only


def _shard_grouped(attention: nn.Module, rank: int, size: int) -> None:
    """Multi-head and grouped-query attention; fewer key heads than ranks are shared by several ranks."""
    name, dim = type(attention).__name__, attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    norm = getattr(attention, "q_norm", None)
    if norm is not None and norm.weight.numel() != dim:
        raise ValueError(f"{name} normalises over all heads: attention-TP is not possible")
    own = _share(heads, rank, size)
    if kv_heads % size != 0 and size % kv_heads != 0:
        sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ValueError(
            f"{kv_heads} key heads and {size} ranks: one must divide the other (nearest: {nearest(size, sizes)})"
        )
    kv_own = _share(kv_heads, rank, size) if kv_heads >= size else torch.tensor([rank * kv_heads // size])
    _keep_rows(attention.q_proj, own, dim)
    _keep_rows(attention.k_proj, kv_own, dim)
    _keep_rows(attention.v_proj, kv_own, dim)
    _keep_columns(attention.o_proj, own, dim)
    attention.num_key_value_groups = len(own) // len(kv_own)
    if hasattr(attention, "sinks"):
        attention.sinks = nn.Parameter(attention.sinks.data[own], requires_grad=False)


def _shard_latent(attention: nn.Module, rank: int, size: int) -> None:
    """Multi-head latent attention (DeepSeek): the compressed keys and values stay whole on every rank."""
    own = _share(attention.num_heads, rank, size)
    queries = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    _keep_rows(queries, own, attention.qk_head_dim)
    _keep_rows(attention.kv_b_proj, own, attention.qk_nope_head_dim + attention.v_head_dim)
    _keep_columns(attention.o_proj, own, attention.v_head_dim)
    attention.num_heads = len(own)


def _share(heads: int, rank: int, size: int) -> torch.Tensor:
    """The heads of a rank."""
    check_divides("attention-TP over", size, heads, f"{heads} attention heads")
    return torch.arange(heads).chunk(size)[rank]


def _keep_rows(linear: nn.Linear, heads: torch.Tensor, width: int) -> None:
    """Keep these heads' outputs, `width` of each."""
    for name, values in list(linear.named_parameters()):
        kept = values.data.unflatten(0, (-1, width))[heads].flatten(0, 1)
        setattr(linear, name, nn.Parameter(kept, requires_grad=False))
    linear.out_features = len(heads) * width


def _keep_columns(linear: nn.Linear, heads: torch.Tensor, width: int) -> None:
    """Keep these heads' inputs, `width` of each."""
    kept = linear.weight.data.unflatten(1, (-1, width))[:, heads].flatten(1)
    linear.weight = nn.Parameter(kept.contiguous(), requires_grad=False)
    linear.in_features = len(heads) * width
