"""The section that names the source of every number."""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from semmoe import __version__
from semmoe.report import words
from semmoe.report.gather import Inputs, PlanFile
from semmoe.report.view import Section, Table

MOST = 1200  # characters of one value


def plan_tables(inputs: Inputs) -> list[Table]:
    """Facts of each plan and of its expected figures; facts that all plans share are in a table of their own."""
    facts = [dict(_plan_facts(entry)) for entry in inputs.plans]
    several = len(facts) > 1
    common = {k: v for k, v in facts[0].items() if several and all(own.get(k) == v for own in facts)}
    tables = [_table("All plans", common)] if common else []
    for entry, own in zip(inputs.plans, facts, strict=True):
        tables.append(_table(f"Plan {words.name(entry.path)}", {k: v for k, v in own.items() if k not in common}))
    return tables


def _table(caption: str, facts: dict[str, str]) -> Table:
    return Table(caption, ["what", "value"], [[name, value] for name, value in facts.items()])


def _plan_facts(entry: PlanFile) -> Iterator[tuple[str, str]]:
    plan, f, e, t = entry.plan, entry.plan.fingerprint, entry.expected, entry.plan.topology
    yield "plan hash", entry.digest
    widths = ("ep_size", "dp_size", "attn_tp_size", "num_nodes")
    yield "topology", ", ".join(f"{name} {getattr(t, name)}" for name in widths)
    yield "method", _long(plan.method)
    yield "settings", ", ".join(f"{name} {value}" for name, value in _flat(plan.settings))[:MOST]
    yield "trace hash", _long(plan.trace_hash) or "unknown"
    yield "model", _long(f.model)
    yield "architecture hash", _long(f.architecture_hash)
    yield "tokenizer hash", _long(f.tokenizer_hash)
    sizes = f"{f.num_layers} MoE layers, {f.num_experts} experts, top-{f.top_k}, vocabulary {f.vocab_size}"
    unknown = "unknown"
    yield "sizes", f"{sizes}, hidden size {f.hidden_size or unknown}, expert size {f.expert_size or unknown}"
    if e is None:
        return
    requests = words.count(e.requests, "request")
    yield "split", f"{requests} ({words.percent(e.holdout)}) held out while solving, seed {e.seed}"
    yield "batches", f"{e.num_batches} of {e.tokens_per_batch:,.0f} tokens, {words.name(e.batches)}"
    if e.links is not None:
        yield "links", f"{_long(e.links.name)} ({_long(e.links.kind)})"
        yield "links from", _long(e.links.source)


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{words.name(key)}.")
        else:
            yield prefix + words.name(key), _long(value)


def _page_table(command: str) -> Table:
    """What wrote the page. Versions are those of the machine that wrote it, not of the one that was measured."""
    facts = {"command": command, "semmoe": __version__, "Python": platform.python_version()}
    facts["packages"] = ", ".join(f"{name} {_version(name)}" for name in ("plotly", "jinja2", "numpy"))
    facts["machine"] = f"{platform.machine()}, {platform.system()}"
    return _table("This page", facts)


def section(inputs: Inputs, command: str) -> tuple[Section, list[Table]]:
    """The section and its tables: plans, files that were read, files that were not, the page."""
    tables = plan_tables(inputs)
    read = [[words.name(source.path), source.what, _facts(source.facts)] for source in inputs.sources]
    unused = [[words.name(entry.path), _long(entry.why)] for entry in inputs.left_out]
    tables += [Table("Files that were read", ["file", "kind", "facts it states"], read)] if read else []
    tables += [Table("Files that were not used", ["file", "reason"], unused)] if unused else []
    tables.append(_page_table(command))
    intro = (
        "Everything on this page comes from these files; a hash is SHA-256. A plan's expected figures are "
        "replayed on requests that its method did not see."
    )
    return Section(id="sources", title="Where every number came from", short="Sources", intro=intro), tables


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _facts(facts: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {_long(value)}" for key, value in facts.items())


def _long(value: Any) -> str:
    """A value from a file as text on one line, of at most MOST characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return words.name(text, longest=MOST)
