"""Writes `support.md`, what runs on which engine, from the table by which doctor and serve decide."""

from pathlib import Path

from semmoe.engines import support

PAGE = Path(__file__).with_name("support.md")
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
HEAD = """# What runs where

`semmoe doctor --engine ENGINE --model MODEL` and `semmoe serve` decide by this table before anything loads, from the
model's configuration and the engine's own options alone. What it does not know is refused. *Works, by a test* names the
test; *works by reading, not run* is what the engine's source says and nobody has run, of which `semmoe serve` warns;
*refused* gives the line that it is refused with. A test of quantised weights compares what every slot holds once
loaded, scales and zeros included, with what the engine loads without a plan: no CPU computes these weights.

`make test-families` ran last, and passed, on 2026-11-26 on SGLang and on 2026-11-23 on vLLM, on the versions below:
every family, attention and number of copies against the engine without a plan, in fp32 token for token, in bfloat16 (on
SGLang Qwen3-MoE and GLM-4.5) with no more differences than the engine's two attentions have between them. (This page
is written by `python docs/supported.py`.)
"""


def page() -> str:
    return HEAD + "".join(map(_section, support.FAMILIES))


def _section(engine: str) -> str:
    from importlib import import_module

    version = import_module(f"semmoe.engines.{engine}.targets").TRIED
    rows = "".join(f"| {what} | {state} | {_cell(note)} |\n" for what, state, note in support.table(engine))
    return f"\n## {TITLES[engine]} {version}\n\n| what | state | by |\n|---|---|---|\n{rows}"


def _cell(note: str) -> str:
    return f"`{note}`" if note.startswith("tests/") else note.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
