"""Where every number came from."""

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
    """What the plans are and what their expected figures rest on; first what they have in common."""
    facts = [dict(_plan_facts(entry)) for entry in inputs.plans]
    common = [name for name, value in facts[0].items() if all(f.get(name) == value for f in facts)]
    if len(facts) == 1:
        common = []
    tables = [_table("All plans", {name: facts[0][name] for name in common})] if common else []
    for entry, own in zip(inputs.plans, facts, strict=True):
        tables.append(_table(f"Plan {words.name(entry.path)}", {k: v for k, v in own.items() if k not in common}))
    return tables


def _table(caption: str, facts: dict[str, str]) -> Table:
    return Table(caption, ["what", "value"], [[name, value] for name, value in facts.items()])


def _plan_facts(entry: PlanFile) -> Iterator[tuple[str, str]]:
    plan, f, e, t = entry.plan, entry.plan.fingerprint, entry.expected, entry.plan.topology
    yield "plan hash", entry.digest
    yield (
        "topology",
        f"ep_size {t.ep_size}, dp_size {t.dp_size}, attn_tp_size {t.attn_tp_size}, num_nodes {t.num_nodes}",
    )
    yield "method", _long(plan.method)
    yield "settings", ", ".join(f"{name} {value}" for name, value in _flat(plan.settings))[:MOST]
    yield "trace hash", _long(plan.trace_hash) or "unknown"
    yield "model", _long(f.model)
    yield "architecture hash", _long(f.architecture_hash)
    yield "tokenizer hash", _long(f.tokenizer_hash)
    widths = f"hidden size {f.hidden_size or 'unknown'}, expert size {f.expert_size or 'unknown'}"
    yield (
        "sizes",
        f"{f.num_layers} MoE layers, {f.num_experts} experts, top-{f.top_k}, vocabulary {f.vocab_size}, {widths}",
    )
    if e is None:
        return
    held_out = (
        f"{words.count(e.requests, 'request')} ({words.percent(e.holdout)}) held out while solving, seed {e.seed}"
    )
    yield "split", held_out
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


def source_table(inputs: Inputs) -> Table:
    rows = [[words.name(s.path), s.what, _facts(s.facts)] for s in inputs.sources]
    return Table("Files that were read", ["file", "what", "what it says of itself"], rows)


def left_out_table(inputs: Inputs) -> Table:
    rows = [[words.name(entry.path), _long(entry.why)] for entry in inputs.left_out]
    return Table("Files that were not used", ["file", "why"], rows)


def page_table(command: str) -> Table:
    """What wrote the page. Versions are those of the machine that wrote it, not of what was measured."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("plotly", "jinja2", "numpy"))
    return _table(
        "This page",
        {
            "command": command,
            "semmoe": __version__,
            "Python": platform.python_version(),
            "packages": packages,
            "machine": f"{platform.machine()}, {platform.system()}",
        },
    )


def section(inputs: Inputs, command: str) -> tuple[Section, list[Table]]:
    """The section and its tables: plans, files, what was left out, the page."""
    tables = plan_tables(inputs)
    tables += [source_table(inputs)] if inputs.sources else []
    tables += [left_out_table(inputs)] if inputs.left_out else []
    intro = (
        "Everything on this page comes from these files; a hash is SHA-256. A plan's expected figures are "
        "replayed on requests that its method did not see."
    )
    return Section(id="sources", title="Where every number came from", short="Sources", intro=intro), [
        *tables,
        page_table(command),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _facts(facts: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {_long(value)}" for key, value in facts.items())


def _long(value: Any) -> str:
    """A value of a file as text, in one line and bounded, but not as short as a name."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return words.name(text, longest=MOST)
