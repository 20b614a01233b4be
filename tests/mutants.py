"""Which faults of a tired colleague the tests notice: mutants written by hand, each with tests of its module.

    python tests/mutants.py         # all; or those whose module has a word in its name: mutants.py routing placement/

`mutants.txt` has them: `# module | names of test files | expression for pytest -k, for the last file`, then the text
that is replaced (-) and what replaces it (+). Each mutant lives in a copy of the repository and is run alone. Compiled
functions run as Python, as in `mutation.py`, which draws mutants at random. Leave out what changes nothing: a mutant
that is equivalent cannot be noticed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 300  # for the tests of one mutant; an endless loop counts as noticed


@dataclass
class Mutant:
    """One fault, and the tests that should notice it."""

    module: str
    tests: list[str]
    expression: str = ""
    old: list[str] = field(default_factory=list)  # lines
    new: list[str] = field(default_factory=list)

    @property
    def commands(self) -> list[list[str]]:
        """Return the arguments of each run of pytest."""
        files = [f"tests/test_{name}.py" for name in self.tests]
        if not self.expression:
            return [files]
        return [*([files[:-1]] if files[1:] else []), [files[-1], "-k", self.expression]]


def read() -> list[Mutant]:
    """Return all mutants of `mutants.txt`."""
    found: list[Mutant] = []
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            module, tests, *expression = line[2:].split(" | ")
            found.append(Mutant(module, tests.split(), *expression))
        else:
            (found[-1].old if line.startswith("-") else found[-1].new).append(line[2:])
    return found


def run(mutant: Mutant, work: Path) -> str:
    """Make the fault in the copy, run its tests, and undo it; return `killed`, `survived` or what is wrong."""
    path, old = work / f"src/semmoe/{mutant.module}.py", "\n".join(mutant.old)
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        return f"the text occurs {source.count(old)} times"
    path.write_text(source.replace(old, "\n".join(mutant.new)), encoding="utf-8")
    try:
        return "survived" if passes(mutant, work) else "killed"
    finally:
        path.write_text(source, encoding="utf-8")


def passes(mutant: Mutant, work: Path) -> bool:
    """Whether the tests of a mutant pass in time."""
    environment = os.environ | {"PYTHONPATH": str(work / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if mutant.module != "jit":
        environment |= {"NUMBA_DISABLE_JIT": "1"}
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    for arguments in mutant.commands:
        words = [*pytest, *arguments]
        try:
            done = subprocess.run(words, cwd=work, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            return False
    return True


def main() -> None:
    words = sys.argv[1:]
    chosen = [mutant for mutant in read() if not words or any(word in mutant.module for word in words)]
    sound: dict[str, bool] = {}  # whether tests pass without a fault
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "copy"
        shutil.copytree(ROOT, work, ignore=shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis"))
        for mutant in chosen:
            tests = str(mutant.commands)
            if tests not in sound:
                sound[tests] = passes(mutant, work)
            found = run(mutant, work) if sound[tests] else f"{tests} fail without a fault"
            counts[found] = counts.get(found, 0) + 1
            if found != "killed":
                print(found, mutant.module, *(f"- {line}" for line in mutant.old), sep="\n  ", end="\n", flush=True)
                print(*(f"  + {line}" for line in mutant.new), sep="\n", flush=True)
    print(", ".join(f"{count} {found}" for found, count in sorted(counts.items())))
    sys.exit(counts.get("killed", 0) < len(chosen))


if __name__ == "__main__":
    main()
