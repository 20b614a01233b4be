"""Stands in for `sgl_kernel`: the names that SGLang 0.5.23 imports on every CPU, and no `torch.ops.sgl_kernel`.

SGLang looks for those operators to choose its fast branches; where it finds none, it computes with plain torch.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+semmoe.cpu"


def missing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a compiled kernel for speculative decoding, and semmoe-sglang-cpu has none"
        )

    refuse.__name__ = name
    return refuse


assign_draft_cache_locs_contiguous_cpu = missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = missing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = missing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = missing("verify_tree_greedy_cpu")
