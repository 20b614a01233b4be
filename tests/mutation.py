"""Which small faults the tests notice: a seeded sample of mutants of the decisions' modules, one test run per mutant.

    pip install cosmic-ray
    python tests/mutation.py --number 300 --seed 0 --out mutants.jsonl

A mutant is one operator, comparison, number, truth value or loop changed by cosmic-ray. As many places of each module
are drawn, then one change at each; annotations, decorators, messages and named constants are left out, and so are
changes to another kind of operator. Mutants live in a copy of the repository. Every outcome is appended to the file, so
that a run which was cut off goes on where it stopped; --again repeats the survivors, after tests have been added.
"""

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
KINDS = ({"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}, {"BitAnd", "BitOr", "BitXor", "LShift", "RShift"},
         {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"}, {"Is", "IsNot"}, {"In", "NotIn"})  # fmt: skip
SECONDS = 400  # for one mutant; an endless loop counts as noticed
# Tests of each module, quickest first. Plain: compiled functions run as Python, as it is faster than to compile them.
PLAIN = {
    "requests/capacity": ["requests_capacity", "balancer", "online"], "requests/predictor": ["requests_predictor"],
    "online": ["online", "replayer"], "tokens/slices": ["tokens_slices"],
    "placement/joint": ["placement_joint", "requests_capacity"], "placement/copies": ["placement_copies"],
}  # fmt: skip
COMPILED = {
    "core": ["core", "plan"], "plan": ["plan"], "replayer": ["replayer"], "tokens/predictor": ["tokens_predictor"],
    "placement/cocluster": ["placement_cocluster"], "placement/search": ["placement_search"],
    "placement/homes": ["placement_search"],
}  # fmt: skip
ONLY = {"core": "Placement"}  # the class of a module that is looked at


def left_out(tree: ast.Module) -> Iterator[ast.AST]:
    """Annotations, decorators, messages, and the values that modules and classes name: those were measured."""
    for node in ast.walk(tree):
        yield from getattr(node, "decorator_list", [])
        yield from filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
        if isinstance(node, ast.JoinedStr):
            yield node
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from (part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign))


def within(nodes: list, place: tuple[int, int]) -> bool:
    return any((n.lineno, n.col_offset) <= place < (n.end_lineno, n.end_col_offset) for n in nodes)


def same_kind(operator: str) -> bool:
    pair = set(operator.split("_")[1:])
    return "Decorator" not in operator and (len(pair) < 2 or "Unary" in operator or any(pair <= k for k in KINDS))


def mutants_by_place(module: str) -> dict[tuple, list[dict]]:
    source, out = (ROOT / f"src/semmoe/{module}.py").read_text(), {}
    tree, nodes = ast.parse(source), list(ast_nodes(get_ast(source)))
    outside = list(left_out(tree))
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == ONLY.get(module)]
    for name in filter(same_kind, operator_names()):
        if get_operator(name).arguments():
            continue
        found = [at for node in nodes for at in get_operator(name)().mutation_positions(node)]
        for occurrence, (start, end) in enumerate(found):
            if not within(outside, start) and (module not in ONLY or within(inside, start)):
                mutant = {"module": module, "operator": name, "occurrence": occurrence, "line": start[0]}
                out.setdefault((module, start, end), []).append(mutant)
    return out


def sample(number: int, seed: int) -> list[dict]:
    """One of each module, then another of each and so on, so that the first few are a fair sample too."""
    rng, columns = random.Random(seed), []
    for module in (*PLAIN, *COMPILED):
        found = mutants_by_place(module)
        columns.append([rng.choice(found[place]) for place in rng.sample(sorted(found), len(found))])
    return [mutant for row in itertools.zip_longest(*columns) for mutant in row if mutant][:number]


def outcome(mutant: dict, work: Path) -> dict:
    """The mutant with what became of it and the first line that it changes."""
    path, source = work / f"src/semmoe/{mutant['module']}.py", (ROOT / f"src/semmoe/{mutant['module']}.py").read_text()
    changed = mutate_code(source, get_operator(mutant["operator"])(), mutant["occurrence"])
    lines = zip(source.splitlines(), changed.splitlines(), strict=False)
    was, now = next(pair for pair in lines if pair[0] != pair[1])
    path.write_text(changed)
    result = run_tests(mutant["module"], work, work / ("once" if "njit" in source else "numba"))
    path.write_text(source)
    shutil.rmtree(work / "once", ignore_errors=True)  # callers in other modules were compiled with the fault
    return mutant | {"outcome": result, "was": was.strip(), "now": now.strip()}


def run_tests(module: str, work: Path, cache: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(work / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"NUMBA_DISABLE_JIT": "1"} if module in PLAIN else {"NUMBA_CACHE_DIR": str(cache)}
    files = [f"tests/test_{name}.py" for name in (PLAIN | COMPILED)[module]]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=100", *files]
    try:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "endless"
    return "survived" if done.returncode == 0 else "killed"


def key(mutant: dict) -> str:
    return "{module}:{operator}:{occurrence}".format_map(mutant)


def run(options: argparse.Namespace, work: Path) -> list[dict]:
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {key(mutant): mutant for mutant in map(json.loads, lines)}
    mutants = sample(options.number, options.seed)
    for mutant in mutants:
        earlier = known.get(key(mutant), {}).get("outcome")
        if earlier is None or (options.again and earlier == "survived"):
            known[key(mutant)] = outcome(mutant, work)
            with options.out.open("a") as file:
                file.write(json.dumps(known[key(mutant)]) + "\n")
    return [known[key(mutant)] for mutant in mutants]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", action="store_true", help="repeat those that survived")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        outcomes = run(options, Path(folder))
    survivors = [mutant for mutant in outcomes if mutant["outcome"] == "survived"]
    print(f"{len(outcomes)} mutants, {len(survivors)} survived")
    for m in survivors:
        print(f"src/semmoe/{m['module']}.py:{m['line']}\n  - {m['was']}\n  + {m['now']}")


if __name__ == "__main__":
    main()
