"""What must not change when walls are moved: plans, replays and generated tokens, written down and compared.

    python tests/guard.py record before.json            # some twenty minutes; --quick: one
    python tests/guard.py compare before.json after.json

It goes through the command line and through files alone, so that it runs before and after a change of the code inside,
on the same machine. Arrays of integers are compared by their hashes, whatever they are called; of arrays of floats the
shape and four sums, within a tolerance; figures as they are printed; tokens one by one.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]  # where `lab` is found
# MoETuner's programs run by the clock. Without any time they are the same on a busy machine and on an idle one.
MAIN = [
    sys.executable,
    "-c",
    "from lab.methods import moetuner; moetuner.TIME_LIMIT = 0.0; from semmoe.cli import main; main()",
]
TOPOLOGIES = {
    "tp8": ["--ep-size", "8", "--attention", "tp"],
    "dp4": ["--ep-size", "4", "--attention", "dp"],
    "tp4": ["--ep-size", "4", "--attention", "tp"],
    "hybrid2x2": ["--ep-size", "4", "--attention", "hybrid", "--dp-size", "2"],
}
METHODS = (
    "linear",
    "eplb",
    "least-loaded",
    "lab.methods.eldr",
    "lab.methods.exflow",
    "lab.methods.moetuner",
    "lab.methods.grace",
    "paper",
    "semmoe",
)
REDUNDANT = {"linear", "eplb", "lab.methods.grace", "semmoe"}
REQUESTS_ONLY = {"least-loaded", "lab.methods.eldr"}
NOT_FIGURES = {"solve_seconds", "seconds", "tokens_per_second", "settings"}
TOLERANCE = 1e-5


def run(*words: str) -> Any:
    """One command of semmoe's; its JSON if it was asked for."""
    done = subprocess.run([*MAIN, *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"semmoe {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout) if "--json" in words else None


def cases(quick: bool) -> list[tuple[str, str, int]]:
    """Topology, method and redundant experts of each plan."""
    methods = ("linear", "eplb", "paper") if quick else METHODS
    return [
        (topology, method, redundant)
        for topology in TOPOLOGIES
        for method in methods
        for redundant in (0, 8)
        if not (redundant and method not in REDUNDANT)
        and not (topology == "tp4" and method != "semmoe")
        and not (method in REQUESTS_ONLY and topology.startswith("tp"))
    ]


def record(quick: bool, folder: Path) -> dict[str, Any]:
    """Everything, by case."""
    trace, prompts = str(folder / "trace"), "8" if quick else "48"
    run("profile", "tiny", "--limit", "24" if quick else "144", "--out", trace)
    found: dict[str, Any] = {"trace": arrays(sorted((folder / "trace").glob("*.safetensors")))}
    for topology, method, redundant in cases(quick):
        name = f"{topology} {short(method)} {redundant}"
        plan = folder / name.replace(" ", "-")
        options = [*TOPOLOGIES[topology], "--method", method, "--redundant-experts", str(redundant), "--seed", "0"]
        run("solve", trace, *options, "--out", str(plan))
        replayed = {short(n): one for n, one in run("replay", trace, "--plan", str(plan), "--json")["methods"].items()}
        found[name] = {"plan": arrays([plan / "plan.safetensors"]), "replay": figures(replayed)}
    generated = ["--limit", prompts, "--max-new-tokens", "16", "--json", "--ep-size", "4"]
    for attention in ("dp", "tp"):
        found[f"generate {attention}"] = outcome(run("generate", "tiny", "--attention", attention, *generated))
    found["generate all-reduce"] = outcome(run("generate", "tiny", "--exchange", "all-reduce", *generated))
    plans = ["hybrid2x2-paper-0", "tp4-semmoe-0", "tp4-semmoe-8", "dp4-semmoe-0", "dp4-semmoe-8"]
    for name in [plan for plan in plans if (folder / plan).exists()]:
        options = [*generated, *(() if name.startswith("dp") else shuffled_always())]
        found[f"generate {name}"] = outcome(run("generate", "tiny", "--plan", str(folder / name), *options))
    return found


def shuffled_always() -> list[str]:
    """The option by which every pass is shuffled, whatever the plan states; revisions without it always did."""
    told = subprocess.run([*MAIN, "generate", "--help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return ["--shuffle-from", "1"] if "--shuffle-from" in told else []


def short(method: str) -> str:
    """The method's name without its package, which moved methods keep."""
    return method.rpartition(".")[2]


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """Tokens, as text, and bytes of a run."""
    kept = ("completions", "sent_bytes", "all_to_all_bytes", "total_bytes", "lar", "remote_ranks_per_token")
    return {name: result[name] for name in kept if name in result}


def figures(value: Any) -> Any:
    """Without what differs from run to run; floats as they are printed."""
    if isinstance(value, dict):
        return {name: figures(part) for name, part in value.items() if name not in NOT_FIGURES}
    if isinstance(value, list):
        return [figures(part) for part in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def arrays(paths: list[Path]) -> dict[str, Any]:
    """Hashes of integer arrays and sums of the others, in an order that names do not decide."""
    loaded = [array for path in paths for array in load_file(path).values()]
    floats = [array.astype(np.float64) for array in loaded if array.dtype.kind == "f"]
    sums = [[list(a.shape), [float(x) for x in (a.sum(), (a * a).sum(), a.min(), a.max())]] for a in floats if a.size]
    return {"integers": sorted(_digest(a) for a in loaded if a.dtype.kind != "f"), "floats": sorted(sums)}


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Where two records differ, each as a path with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(before.keys() | after.keys())
        return [line for n in names for line in differences(before.get(n), after.get(n), f"{where}/{n}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (old, new) in pairs for line in differences(old, new, f"{where}/{i}")]
    if isinstance(before, float) and isinstance(after, float):
        same = abs(before - after) <= TOLERANCE * max(1.0, abs(before))
    else:
        same = before == after
    return [] if same else [f"{where}: {before!r} became {after!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--quick", action="store_true")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        with tempfile.TemporaryDirectory() as folder:
            given.out.write_text(json.dumps(record(given.quick, Path(folder)), indent=1) + "\n")
        return
    found = differences(*(json.loads(path.read_text()) for path in (given.before, given.after)))
    print("\n".join(found[:50]) or "nothing has changed")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
