"""What can be known of the Triton kernels without a GPU: that they compile, what they take, and that they are right.

    python benchmarks/prove_kernels.py [--tokens 1 64 512 8192] [--out FILE]

Every kernel is compiled for sm_80, sm_90, sm_100 and gfx942 with the constants of DeepSeek-V3's shapes (hidden 7168,
top-8 of 256 experts, 8 ranks, 3 layers of history), and the assignment to slices also for 16. Registers are a thread's
and shared memory a block's, as ptxas and LLVM report them, and with them the bytes that a thread spills to its stack:
more than 64 are an exit code of 1. Then every kernel runs in Triton's interpreter at these shapes,
against its reference in plain torch or numba, bit for bit (tests/test_kernels_at_real_shapes.py). What
is left for a GPU: its own compiler driver, its memory model, and speed (benchmarks/bench_kernels.py).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from semmoe.runtime.kernels import argsort, assign, copies, history, scores, shuffle
from semmoe.tokens.kernels import CHUNK

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32),
           "gfx942": ("hip", "gfx942", 64)}  # fmt: skip
NUMBERS = ("tokens", "first", "ranks", "slices")
MOST_SPILLED = 64  # bytes of a thread
TESTS = Path(__file__).parent.parent / "tests" / "test_kernels_at_real_shapes.py"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Kernel:
    function: Any
    pointers: dict[str, str]
    numbers: tuple[str, ...]
    constants: dict[str, Any]
    warps: int = 4
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.function.__name__} {self.variant}".strip()


@dataclass(frozen=True)
class Resources:
    kernel: str
    target: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack; registers on gfx942
    shared: int  # bytes of a block
    warps: int


def kernels() -> Iterator[Kernel]:
    rows = {"rows": "*bf16", "others": "*bf16", "index": "*i64", "out": "*bf16", "mine": "*bf16"}
    yield Kernel(shuffle.gather_kernel, rows, ("number", "first", "width"), {"BLOCK": shuffle.COLUMNS})
    outs = {"order": "*i64", "inverse": "*i64", "counts": "*i32", "real": "*i1"}
    yield Kernel(
        argsort.order_kernel, {"ranks": "*i16", **outs}, ("rows", "size"), {"BLOCK": argsort.BLOCK, "BINS": 16}
    )
    held = {"expert_ids": "*i32", "ranks": "*i16", "physical": "*i32", "preferred": "*i16", "out": "*i32"}
    held |= {"totals": "*i64", "real": "*i64"}
    sizes = ("number", "top_k", "source", "num_ranks", "per_rank", "width")
    block = {"BLOCK": copies.TILE // 64, "EXPERTS": 8, "RANKS": 8, "NODES": 1}
    for width, variant in enumerate(("counts", "looks up", "chooses")):
        constants = {"COPIES": width, "COUNT": True, "BOUND": True, **block}
        yield Kernel(copies.place_kernel, held, sizes, constants, variant=variant)
    block = {"BLOCK": history.TILE // 8, "WIDTH": 8}
    states = {"running": "*i32", "previous": "*i32", "slots": "*i64"}
    given = {"out": "*bf16", "rows": "*bf16", "inverse": "*i64", "routed": "*u8", "expert_ids": "*u8", "real": "*i1"}
    yield Kernel(history.restore_kernel, {**given, "table": "*i16", "seen": "*i64", **states},
                 ("layer", "number", "width", "ranks", "experts", "top_k"),
                 {"OBSERVES": True, "BLOCK": shuffle.COLUMNS, "EXPERTS": 8, "WIDTH": 8})  # fmt: skip
    given, numbers = {"rows": "*i16", "order": "*i64", "expert_ids": "*u8"}, ("tokens", "batch", "ranks", "table")
    yield Kernel(history.sums_kernel, {"sums": "*i32", **given}, numbers, {"TOP_K": 8, **block})
    given |= {"sums": "*i32", "seen": "*i64", "first": "*i64", **states}
    yield Kernel(history.in_turn_kernel, given, (*numbers, "num_slots"), {"TOP_K": 8, "WIDTH": 8}, warps=1)
    packed = {"out": "*u8", "expert_ids": "*i32", "weights": "*fp32", "logical": "*i64"}
    yield Kernel(history.by_weight_kernel, packed, ("number",), {"MAPS": True, "TOP_K": 8, **block})
    looked = {"out": "*i32", "token_ids": "*i64", "token_rows": "*i32", "token_scores": "*i8", "shifts": "*i32"}
    yield Kernel(scores.look_up_kernel, looked, (*NUMBERS, "last", "rows"), {"BLOCK": scores.SCORE_BLOCK, "WIDTH": 8})
    paths = {"pick": "*i16", "looked_up": "*i32", "path_scores": "*i16", "routed": "*u8", "mean": "*i16"}
    looks = {"LAYERS": 3, "ORDERED": 1, "EXPERTS": 256, "BLOCK": CHUNK}
    for slices, whole in product((8, 16), (True, False)):
        yield Kernel(assign.slices_kernel, {**outs, **paths, **states, "decoding": "*i1"}, (*NUMBERS, "layer", "top_k"),
                     {**looks, "WIDTH": slices, "WHOLE": whole}, warps=slices,  # as `assign.slices` launches them
                     variant=f"{slices}, {'whole' if whole else 'chunks'}")  # fmt: skip


def compile_for(kernel: Kernel, target: str) -> Resources:
    """Raises what Triton raises where it does not compile."""
    kinds = {**kernel.pointers, **dict.fromkeys(kernel.numbers, "i32"), **dict.fromkeys(kernel.constants, "constexpr")}
    signature = {name: kinds[name] for name in kernel.function.arg_names}
    source = triton.compiler.ASTSource(fn=kernel.function, signature=signature, constexprs=kernel.constants)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": kernel.warps})
    registers, spilled = of_amd(made.asm["amdgcn"]) if target == "gfx942" else of_nvidia(made.asm["cubin"])
    return Resources(kernel.name, target, registers, spilled, made.metadata.shared, kernel.warps)


def of_nvidia(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        given = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", given)
    assert found, given
    return int(found[1]), int(found[2])


def of_amd(assembly: str) -> tuple[int, int]:
    registers, spilled = (re.search(rf"\.{key}:\s+(\d+)", assembly) for key in ("vgpr_count", "vgpr_spill_count"))
    assert registers, "LLVM says no registers"
    return int(registers[1]), int(spilled[1]) if spilled else 0


def show(found: list[Resources]) -> None:
    print(f"  {'kernel':32}{'warps':>6}" + "".join(f"{target:>26}" for target in TARGETS))
    print(" " * 40 + "".join(f"{'registers, stack, shared':>26}" for _ in TARGETS))
    for name in dict.fromkeys(r.kernel for r in found):
        own = {r.target: r for r in found if r.kernel == name}
        cells = [f"{r.registers}, {r.spilled}, {r.shared} B" for r in own.values()]
        print(f"  {name:32}{next(iter(own.values())).warps:6}" + "".join(f"{cell:>26}" for cell in cells))


def agree(tokens: list[int]) -> bool:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, str(TESTS), *map(str, tokens)]
    return subprocess.run(words, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 512, 8192])
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    a = parser.parse_args()
    print(f"Triton {triton.__version__}, {platform.machine()}, no GPU\n", flush=True)
    found = [compile_for(kernel, target) for kernel in kernels() for target in TARGETS]
    show(found)
    print(flush=True)
    right = agree(a.tokens)
    spills = [f"{r.kernel} on {r.target}" for r in found if r.spilled > MOST_SPILLED]
    print("\n  " + (f"too little room in registers: {', '.join(spills)}" if spills else "registers suffice"))
    line = json.dumps({"resources": [asdict(r) for r in found], "tokens": a.tokens, "agree": right})
    print("\n" + line)
    if a.out:
        a.out.write_text(line + "\n")
    return 0 if right and not spills else 1


if __name__ == "__main__":
    sys.exit(main())
