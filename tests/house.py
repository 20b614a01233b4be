"""The house's rules that a reader can check: lines per room, file and function, the direction of imports, lost names.

    python tests/house.py        # a table; ends with 1 where something is over its budget

`make check` runs it. A budget rises only in a commit that lowers others by more, and the total never rises.
"""

import ast
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "semmoe"
OUTSIDE = ("tests", "benchmarks", "lab", "docs", "examples")
TOTAL, FILE, FUNCTION = 25_030, 350, 50
# Rooms and their most lines. A folder is a room; files beside each other share one.
ROOMS = {
    "core.py": 269,
    "topology.py": 121,
    "settings.py": 204,
    "plan.py": 183,
    "solver.py": 156,
    "io": 608,
    "numeric": 272,
    "traces": 1152,
    "tokens": 1056,
    "requests": 640,
    "placement": 3038,
    "paper": 569,
    "costs": 776,
    "evaluation": 690,
    "runtime": 2073,
    "checkpoint": 1280,
    "engines": 6483,
    "live": 2008,
    "gateway": 349,
    "report": 682,
    "cli": 2378,
    "__init__.py": 43,
}
# From the ground up: a module imports from its own storey and those below.
STOREYS = (
    ("io", "numeric", "core", "topology"),
    ("settings", "costs", "traces"),
    ("tokens", "requests"),
    ("placement", "paper"),
    ("plan",),
    ("solver", "evaluation"),
    ("runtime",),
    ("checkpoint", "engines", "live"),
    ("gateway", "report", "cli"),
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `semmoe`, but for the public face."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = path
    return found


def imported(path: Path, known: dict[str, Path], always: bool) -> Iterator[str]:
    """The package's modules that a file imports; always: those alone that are imported with it, not in a function."""
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8")), always):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "semmoe":
            base = (node.module or "").removeprefix("semmoe").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                if whole in known or base in known:
                    yield whole if whole in known else base


def _nodes(tree: ast.AST, always: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (always and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield node
            yield from _nodes(node, always)


def storey(name: str) -> int:
    """The number of the storey that a module is on."""
    return next(i for i, rooms in enumerate(STOREYS) if name.split(".")[0] in rooms)


def upward() -> list[str]:
    """Imports from a storey above, also those inside functions."""
    known = modules()
    pairs = [(name, other) for name, path in known.items() for other in imported(path, known, always=False)]
    return [f"{name} imports {other}" for name, other in pairs if storey(other) > storey(name)]


def cycles() -> list[str]:
    """Modules from which a chain of imports leads back."""
    known = modules()
    graph = {name: set(imported(path, known, always=True)) - {name} for name, path in known.items()}
    while True:  # take away what imports nothing that is left
        free = [name for name, others in graph.items() if not others & graph.keys()]
        if not free:
            return sorted(graph)
        for name in free:
            del graph[name]


def between_methods() -> list[str]:
    """Rival methods that import more of our own placement than the problem and the plain helpers."""
    known, plain = modules(), {"placement.problem", "placement.greedy", "placement.linear"}
    rivals = [name for name in known if name.startswith("paper.") or name in ("placement.eplb", "placement.unscored")]
    others = {name: set(imported(known[name], known, always=False)) for name in rivals}
    return [
        f"{name} imports {o}" for name, found in others.items() for o in found - plain if o.startswith("placement.")
    ]


def lost_names() -> list[str]:
    """Names of the package that tests, benchmarks, the lab, documents or examples use, and that its modules lack."""
    known, root = {f"semmoe.{name}": path for name, path in modules().items()}, SOURCE.parents[1]
    names = {module: _bound(path) for module, path in known.items()}
    names = {module: found for module, found in names.items() if "__getattr__" not in found}  # others load on demand
    return [
        f"{path.relative_to(root)}:{line}: {module} has no {name}"
        for path in sorted(path for folder in OUTSIDE for path in (root / folder).rglob("*.py"))
        for module, name, line in _used(ast.parse(path.read_text(encoding="utf-8")), known)
        if module in names and name not in names[module] and f"{module}.{name}" not in known
    ]


def _bound(path: Path) -> set[str]:
    return set(symtable.symtable(path.read_text(encoding="utf-8"), path.name, "exec").get_identifiers())


def _used(tree: ast.AST, known: dict[str, Path]) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of what a file imports from the package, and of attributes of the modules among them."""
    nodes, ours = list(ast.walk(tree)), {}
    for node in nodes:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            yield node.module or "", alias.name, node.lineno
            if f"{node.module}.{alias.name}" in known:
                ours[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:  # a variable or parameter of the same name hides the module
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)):
            ours.pop(node.arg if isinstance(node, ast.arg) else node.id, None)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            yield ours[node.value.id], node.attr, node.lineno


def room_lines() -> dict[str, int]:
    """Lines of each room."""
    paths = {room: [p for part in room.split() for p in _files(SOURCE / part)] for room in ROOMS}
    return {room: sum(len(p.read_text(encoding="utf-8").splitlines()) for p in found) for room, found in paths.items()}


def _files(part: Path) -> list[Path]:
    return [part] if part.suffix == ".py" else sorted(part.rglob("*.py"))


def over_budget() -> list[str]:
    """What is longer than it may be."""
    lines, everything = room_lines(), [(p, p.read_text(encoding="utf-8")) for p in sorted(SOURCE.rglob("*.py"))]
    total = sum(len(text.splitlines()) for _, text in everything)
    found = [f"the package has {total:,} lines, of at most {TOTAL:,}"] if total > TOTAL else []
    if total != sum(lines.values()):
        found.append("a file of the package belongs to no room, or to two")
    found += [f"{room} has {n} lines, of at most {ROOMS[room]}" for room, n in lines.items() if n > ROOMS[room]]
    for path, text in everything:
        name, length = path.relative_to(SOURCE), len(text.splitlines())
        found += [f"{name} has {length} lines, of at most {FILE}"] if length > FILE else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n = (node.end_lineno or 0) - node.lineno + 1
                found += [f"{name}: {node.name} has {n} lines, of at most {FUNCTION}"] if n > FUNCTION else []
    return found


def raised_budgets(before: tuple[int, dict[str, int]], now: tuple[int, dict[str, int]]) -> list[str]:
    """Budgets (total, rooms) that rose although others did not fall by more; a room that is new rises from 0."""
    found = [f"the total rose from {before[0]:,} to {now[0]:,} lines"] if now[0] > before[0] else []
    changes = {room: now[1].get(room, 0) - before[1].get(room, 0) for room in before[1] | now[1]}
    rises = {room: change for room, change in changes.items() if change > 0}
    if rises and sum(changes.values()) >= 0:
        found += [f"{room} rose by {change} lines, and the others fell by no more" for room, change in rises.items()]
    return found


def budgets_before() -> tuple[int, dict[str, int]] | None:
    """The budgets of the parent commit, or of the last commit if this file was changed since; None without git."""
    here = Path(__file__).read_text(encoding="utf-8")
    for revision in ("HEAD", "HEAD^"):
        command = ["git", "show", f"{revision}:tests/house.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCE)
        if done.returncode:
            return None
        if done.stdout != here or revision == "HEAD^":
            return budgets(done.stdout)
    return None


def budgets(source: str) -> tuple[int, dict[str, int]]:
    """The total and the rooms' budgets that the text of this file states."""
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    stated = {ast.unparse(node.targets[0]).strip("()"): node.value for node in assigned}
    return ast.literal_eval(stated["TOTAL, FILE, FUNCTION"])[0], ast.literal_eval(stated["ROOMS"])


def main() -> None:
    lines = room_lines()
    for room, n in lines.items():
        print(f"{n:6,} of {ROOMS[room]:6,}  {room}")
    print(f"{sum(lines.values()):6,} of {TOTAL:6,}  in all")
    before = budgets_before()
    problems = over_budget() + lost_names()
    problems += raised_budgets(before, (TOTAL, ROOMS)) if before is not None else []
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
