"""An engine's command line, as it serves today: what `semmoe init` reads of it, and what it writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semmoe.checkpoint.directory import read_config
from semmoe.engines import support
from semmoe.topology import Topology

# Names of each size, of which the last that is given counts.
SIZES = {
    "sglang": {
        "tp": ("--tp-size", "--tp", "--tensor-parallel-size"),
        "dp": ("--dp-size", "--dp", "--data-parallel-size"),
        "ep": ("--ep-size", "--ep", "--expert-parallel-size"),
        "nodes": ("--nnodes",),
        "port": ("--port",),
        "copies": ("--ep-num-redundant-experts",),
    },
    "vllm": {
        "tp": ("--tensor-parallel-size", "-tp"),
        "dp": ("--data-parallel-size", "-dp"),
        "local": ("--data-parallel-size-local", "-dpl"),
        "nodes": ("--nnodes", "-n"),
        "port": ("--port",),
    },
}
PORTS = {"sglang": 30000, "vllm": 8000}
# Options that semmoe sets itself or that are part of the command; the others are passed on. Those with a value first.
VALUED = {
    "sglang": {"--model-path", "--model", "--host", "--init-expert-location", "--ep-dispatch-algorithm"},
    "vllm": {"--host", "--eplb-config"},
}
SWITCHES = {
    "sglang": {"--enable-dp-attention", "--enable-eplb", "--enable-metrics"},
    "vllm": {"--enable-expert-parallel", "--enable-eplb"},
}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    engine: str
    topology: Topology
    redundant: int
    port: int
    options: tuple[str, ...]  # of the engine, which `semmoe serve` passes on


def read(words: Sequence[str], redundant: int) -> Deployment:
    """The deployment that an engine's command starts; redundant: experts to add where it has none.

    Raises ValueError for a command of another program, or one without expert parallelism.
    """
    engine, rest = _engine(words)
    given, flags = _options(rest)
    sizes = {name: _number(given, names) for name, names in SIZES[engine].items()}
    topology, copies = (_sglang if engine == "sglang" else _vllm)(sizes, given, flags)
    port = PORTS[engine] if sizes["port"] is None else sizes["port"]
    ours = {name for names in SIZES[engine].values() for name in names if name not in ("--nnodes", "-n", "-dpl")}
    ours -= {"--data-parallel-size-local"}
    options = _without(rest, ours | VALUED[engine], SWITCHES[engine])
    return Deployment(engine=engine, topology=topology, redundant=copies or redundant, port=port, options=options)


def _engine(words: Sequence[str]) -> tuple[str, list[str]]:
    """The engine, and its words after the command."""
    for i, word in enumerate(words):
        name = Path(word).name
        if name == "sglang.launch_server" or (name == "sglang" and words[i + 1 : i + 2] == ["serve"]):
            return "sglang", list(words[i + 1 + (name == "sglang") :])
        if name in ("vllm", "vllm.entrypoints.cli.main") and list(words[i + 1 : i + 2]) == ["serve"]:
            model = words[i + 2 : i + 3]
            return "vllm", list(words[i + 2 + bool(model and not model[0].startswith("-")) :])
        if name == "vllm.entrypoints.openai.api_server":
            return "vllm", list(words[i + 1 :])
    raise ValueError("give the engine's command after --, such as: -- vllm serve MODEL --data-parallel-size 8")


def _options(words: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Values by option, and all options that are given."""
    given: dict[str, str] = {}
    flags: set[str] = set()
    for i, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, _, value = word.partition("=")
        flags.add(name)
        after = words[i + 1] if i + 1 < len(words) else ""
        given[name] = value or ("" if after.startswith("--") else after)
    return given, flags


def _number(given: dict[str, str], names: tuple[str, ...]) -> int | None:
    """The value of an option of several names; None if it is not given."""
    found = [name for name in names if name in given]
    if not found:
        return None
    value = given[found[-1]]
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{found[-1]} must be a number from 1 on, not {value!r}")
    return int(value)


def _sglang(sizes: dict[str, int | None], given: dict[str, str], flags: set[str]) -> tuple[Topology, int]:
    ranks, groups = sizes["tp"] or 1, sizes["dp"] or 1
    all_to_all = given.get("--moe-a2a-backend", "none") != "none"
    if (sizes["ep"] or (ranks if all_to_all else 1)) != ranks or ranks == 1:
        raise ValueError(f"experts are not parallel over all ranks: semmoe serves with --ep-size {ranks}, as --tp-size")
    if groups > 1 and "--enable-dp-attention" not in flags:
        raise ValueError("--dp-size without --enable-dp-attention starts replicas: init reads the command of one")
    return Topology(ep_size=ranks, dp_size=groups, num_nodes=sizes["nodes"] or 1), sizes["copies"] or 0


def _vllm(sizes: dict[str, int | None], given: dict[str, str], flags: set[str]) -> tuple[Topology, int]:
    groups, ranks = sizes["dp"] or 1, (sizes["tp"] or 1) * (sizes["dp"] or 1)
    if "--enable-expert-parallel" not in flags or ranks == 1:
        raise ValueError("experts are not parallel: give --enable-expert-parallel and more ranks than one")
    nodes = sizes["nodes"] or (groups // sizes["local"] if sizes["local"] else 1)
    try:
        balancer: Any = json.loads(given.get("--eplb-config", "{}"))
        copies = int(balancer.get("num_redundant_experts", 0))
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"--eplb-config is not valid JSON: {given['--eplb-config']}") from None
    return Topology(ep_size=ranks, dp_size=groups, num_nodes=nodes), copies


def _without(words: Sequence[str], valued: set[str], switches: set[str]) -> tuple[str, ...]:
    """The words without these options, and the values of those that have one."""
    out, skip = [], False
    for word in words:
        name, _, value = word.partition("=")
        if skip or name in valued | switches:
            skip = name in valued and not value and not skip
            continue
        out.append(word)
    return tuple(out)


def verdict(found: Deployment, model: Path) -> tuple[list[str], list[str]]:
    """Why a plan cannot be served there, and what of it was never run: messages."""
    use = support.Use(
        engine=found.engine,
        config=read_config(model),
        topology=found.topology,
        redundant=found.redundant,
        shuffles=found.topology.attn_tp_size > 1,
        schedules=found.topology.dp_size > 1,
        options=found.options,
    )
    return support.problems(use), support.cautions(use)


def stated(found: Deployment) -> dict[str, Any]:
    """What was read, by name."""
    t = found.topology
    sizes = {"ep_size": t.ep_size, "dp_size": t.dp_size, "num_nodes": t.num_nodes, "attention": t.attention}
    return {"engine": found.engine, **sizes, "redundant_experts": found.redundant, "port": found.port}


def config_file(found: Deployment, model: str) -> str:
    """The text of a file for `semmoe --config`."""
    t = found.topology
    sizes = [f"ep-size = {t.ep_size}", f'attention = "{t.attention}"']
    sizes += [f"dp-size = {t.dp_size}"] if t.attention == "hybrid" else []
    sizes += [f"num-nodes = {t.num_nodes}"] if t.num_nodes > 1 else []
    lines = [
        f"# {found.engine} serving {json.dumps(model)} on {t.ep_size} ranks: semmoe --config THIS COMMAND",
        *("", "[solve]", *sizes, f"redundant-experts = {found.redundant}"),
        *("", "[replay]", *sizes),
        *("", "[serve]", f'engine = "{found.engine}"', f"port = {found.port}", *sizes),
        *("", "[estimate]", *sizes),
    ]
    return "\n".join(lines) + "\n"


def commands(found: Deployment, model: str, config: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """What each command is for, and its words; folder: the server's control folder."""
    semmoe, url = ["semmoe", "--config", str(config)], f"http://127.0.0.1:{found.port}"
    options = ["--", *found.options] if found.options else []
    return [
        ("serve as today, with a recorder", [*semmoe, "serve", model, *options]),
        ("record some minutes of traffic", ["semmoe", "record", "start", str(folder)]),
        ("and end it", ["semmoe", "record", "stop", str(folder), "--out", "trace"]),
        ("solve a plan: is it worth it?", [*semmoe, "solve", "trace", "--out", "plan"]),
        ("serve on it", [*semmoe, "serve", model, "--plan", "plan", *options]),
        ("see whether it holds", ["semmoe", "watch", url, "--plan", "plan"]),
        ("or let it follow the traffic", ["semmoe", "adapt", url, "--plan", "plan"]),
    ]
