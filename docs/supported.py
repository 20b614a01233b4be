"""Writes `support.md`, what runs on which engine, from the table by which doctor and serve decide."""

from pathlib import Path

from semmoe.engines import support

PAGE = Path(__file__).with_name("support.md")
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
HEAD = """# What runs where

`semmoe doctor --engine ENGINE --model MODEL` and `semmoe serve` decide by this table before anything loads, only from
the model's configuration and the engine's own options. A feature that the table does not list is refused. *Works, by
a test* names the test. *Works by reading, not run* is the result of reading the engine's source; it has not been run,
and `semmoe serve` warns about it. *Refused* gives the message of the refusal. A test of quantized weights compares
the loaded content of every slot, scales and zeros included, with the content that the engine loads without a plan: no
CPU computes these weights.

`make test-families` last ran, and passed, on 2026-11-26 on SGLang and on 2026-11-23 on vLLM, on the versions below.
It compares every family, attention and number of copies with the engine without a plan: in fp32 token for token, in
bfloat16 (on SGLang Qwen3-MoE and GLM-4.5) with no more differences than between the engine's two attentions. (`python
docs/supported.py` writes this page.)
"""


def page() -> str:
    return HEAD + "".join(map(_section, support.FAMILIES))


def _section(engine: str) -> str:
    from importlib import import_module

    version = import_module(f"semmoe.engines.{engine}.targets").TRIED
    rows = "".join(f"| {what} | {state} | {_cell(note)} |\n" for what, state, note in support.table(engine))
    return f"\n## {TITLES[engine]} {version}\n\n| family or feature | state | test or message |\n|---|---|---|\n{rows}"


def _cell(note: str) -> str:
    return f"`{note}`" if note.startswith("tests/") else note.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
