"""The dashboard that ships with the metrics asks for those that there are."""

import json
import re
from pathlib import Path

import semmoe
from semmoe.cli import adapt
from semmoe.engines import counters

DASHBOARD = json.loads((Path(semmoe.__file__).parent / "grafana/dashboard.json").read_text())


def documented(module, prefix):
    """Names and labels as the module's own table has them."""
    lines = re.findall(r"^    ([\w, ]+?)(?:\{(.*?)\})?  +\S", module.__doc__, re.M)
    return {prefix + name: set(re.findall(r"\w+", labels)) for names, labels in lines for name in names.split(", ")}


DECISIONS = adapt.decisions(0)
KNOWN = documented(counters, "semmoe_")
KNOWN |= {DECISIONS.describe()[0].name: set(DECISIONS._labelnames)}


def test_every_query_asks_for_a_metric_and_labels_that_exist():
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    found = [
        (re.sub("_(total|bucket)$", "", n), labels)
        for q in queries
        for n, labels in re.findall(r"(semmoe_\w+)\{(.*?)\}", q)
    ]
    assert len(found) >= 15
    for name, labels in found:
        assert name in KNOWN, name
        assert set(re.findall(r"(\w+)=", labels)) <= KNOWN[name] | {"job"}, (name, labels)
    for query in queries:
        by = {label for labels in re.findall(r"by \((.*?)\)", query) for label in re.findall(r"\w+", labels)}
        assert by <= set().union(*KNOWN.values()) | {"le"}, query


def test_panels_do_not_lie_on_each_other():
    cells = [
        (x, y) for p in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
