"""What aiconfigurator says of a model's passes: run as a program, because its Python interface changes.

Supported is version 0.12, installed by the user; nothing is downloaded here. It says the parts of a pass that a plan
does not change. Its all-to-all takes no traffic, and its routed experts have a load of its own, so neither is read.
From 128 ranks on its tables hold estimates, which are not read either.
"""

import re
import shutil
import subprocess
from pathlib import Path

from semmoe.estimate.forecast import EXTRAPOLATED_FROM, Case, Outside

PROGRAM, SUPPORTED = "aiconfigurator", "0.12."
LABELS = {"silicon": "measured", "mixed": "fitted", "empirical": "fitted"}
ROW = re.compile(r"^\s+(context|generation)_(\w+)\s+([\d.,]+) ms .*\[(\w+)\]\s*$", re.M)
NOT_READ = ("moe", "moe_dispatch", "moe_combine", "moe_pre_dispatch", "moe_post_dispatch", "logits_gemm")
TIMEOUT = 300  # seconds


def obstacle(case: Case) -> str | None:
    """Why aiconfigurator cannot say anything of a case; None if it may."""
    if case.gpu.system is None:
        return f"it has no tables of the {case.gpu.name}"
    if case.topology.ep_size >= EXTRAPOLATED_FROM:
        return f"from {EXTRAPOLATED_FROM} ranks on it estimates"
    if case.topology.attn_tp_size > 1:
        return "it is asked for attention dp only"
    if case.settings.overlap and (case.settings.batch % 2 or case.settings.prompts % 2):
        return "it is asked for equal halves, and the batch or the prompts are odd"
    if shutil.which(PROGRAM) is None:
        return "it is not installed"
    found = _run(["version"])
    version = re.search(r"\d+\.\d+\.\d+\S*", found)
    if version is None or not version[0].startswith(SUPPORTED):
        return f"version {SUPPORTED}x is supported, not {version[0] if version else 'one that is not told'}"
    return None


def ask(case: Case, model: Path) -> dict[bool, Outside]:
    """The parts of a decoding step and of a prefill. Raises ValueError if it does not say them."""
    return {decode: _parts(case, model, decode) for decode in (True, False)}


def command(case: Case, model: Path, decode: bool) -> list[str]:
    """The command for a pass; of half a batch where two halves take turns."""
    asked, ranks = case.settings, str(case.topology.ep_size)
    requests = asked.batch if decode else asked.prompts
    size = requests // 2 if asked.overlap else requests
    folder = model if model.is_dir() else model.parent
    return [
        *("cli", "estimate", "--model-path", str(folder), "--system", str(case.gpu.system), "--backend", "sglang"),
        *("--estimate-mode", "static_gen" if decode else "static_ctx", "--tp", "1", "--dp", ranks, "--ep", ranks),
        *("--etp", "1", "--batch-size", str(size), "--isl", str(asked.input_length), "--osl"),
        *(str(max(asked.output_length, 2)), "--detail", "all", "--no-color"),
    ]


def read(text: str, steps: int) -> Outside:
    """The parts that `aiconfigurator cli estimate --detail all` printed, of one of `steps` equal passes."""
    seconds, labels = {}, {}
    for _, name, milliseconds, source in ROW.findall(text):
        if name in NOT_READ:
            continue
        if "overlap" in name:
            raise ValueError("aiconfigurator joins routed and shared experts in one figure here")
        if source not in LABELS:
            raise ValueError(f"aiconfigurator says that {name} is {source!r} here")
        said = name.replace("_", " ")
        seconds[said] = float(milliseconds.replace(",", "")) * 1e-3 / steps
        labels[said] = LABELS[source]
    if not any("attention" in name for name in seconds):
        raise ValueError(f"aiconfigurator says nothing of these passes: {_last_line(text)}")
    return Outside(seconds=seconds, labels=labels)


def _parts(case: Case, model: Path, decode: bool) -> Outside:
    steps = max(case.settings.output_length, 2) - 1 if decode else 1
    return read(_run(command(case, model, decode)), steps)


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"aiconfigurator did not answer in {TIMEOUT} seconds: take --performance roofline") from None
    return done.stdout + done.stderr


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")[:300]
