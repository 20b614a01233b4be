"""Triton kernels on a machine without a GPU: run by the interpreter, and compiled for GPUs that it need not have."""

import os
import subprocess
import sys

import pytest

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]
NO_TRITON = "Triton is not installed; a CPU build of torch does not bring it"


def interpret(file: str, *words: str) -> None:
    """Run a test file as a script with the interpreter on: Triton reads the switch when it is imported."""
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, file, *words], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


def compiles(target, kernel, pointers: dict, numbers: tuple, constants: dict) -> None:
    """For a target; on one of them also with each number 1, which launches compile as a constant."""
    _compile(target, kernel, pointers, numbers, constants)
    known = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    for one in sorted(set(numbers) - known) if target == TARGETS[1] else ():
        _compile(target, kernel, pointers, tuple(set(numbers) - {one}), {**constants, one: 1})


def _compile(target, kernel, pointers: dict, numbers: tuple, constants: dict) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    kinds = {**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds[name] for name in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget(*target)).asm
