"""The dashboard that ships with the metrics asks for those that there are."""

import json
import re
from pathlib import Path

import semmoe
from semmoe.cli import running
from semmoe.engines import counters

DASHBOARD = json.loads((Path(semmoe.__file__).parent / "grafana/dashboard.json").read_text())


# Labels of counters that no table of docs/reference.md has.
LABELS = {
    "served_pairs": {"by"},
    "sent_bytes": {"ep_rank", "kind"},
    "swaps": {"ep_rank", "outcome"},
    "scheduled_requests": {"dp_rank", "by"},
}


def documented() -> dict[str, set[str]]:
    """Labels by the names of all counters, as the pages have them."""
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    found = {"semmoe_" + name: LABELS.get(name, set()) for name in counters.DESCRIPTIONS}
    for names, labels in re.findall(r"^\| (`semmoe_[^|]*) \| ([^|]*) \|", page, re.M):
        for name in re.findall(r"`(\w+?)(?:_total)?`", names):
            found[name] = set(re.findall(r"`(\w+)`", labels))
    return found


DECISIONS = running.decisions(0)
KNOWN = documented()
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
