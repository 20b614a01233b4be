"""Imports go one way, and nothing is longer than it may be."""

from pathlib import Path

import house


def test_a_module_imports_from_its_own_storey_and_below():
    assert house.upward() == []


def test_there_is_no_cycle_of_imports():
    assert house.cycles() == []


def test_no_method_of_the_field_imports_another():
    assert house.between_methods() == []


def test_every_room_file_and_function_keeps_its_budget():
    assert house.over_budget() == []


def test_what_tests_and_benchmarks_take_from_the_package_is_there():
    assert house.lost_names() == []


def test_a_name_that_left_its_module_is_found(tmp_path, monkeypatch):
    (source := tmp_path / "src" / "semmoe").mkdir(parents=True)
    (source / "plan.py").write_text("def load():\n    inner = 1\n")
    (tmp_path / "lab").mkdir()
    text = "from semmoe import plan\nfrom semmoe.plan import inner, load\n\ndef f(): return plan.load(), plan.save\n"
    (tmp_path / "lab" / "use.py").write_text(text)
    (tmp_path / "lab" / "hidden.py").write_text("from semmoe import plan\n\ndef f(plan): return plan.save\n")
    monkeypatch.setattr(house, "SOURCE", source)
    assert house.lost_names() == [
        "lab/use.py:2: semmoe.plan has no inner",
        "lab/use.py:4: semmoe.plan has no save",
    ]


def test_the_checks_can_fail(tmp_path, monkeypatch):
    """A house of three modules: core imports plan, plan imports core, and plan is long."""
    (tmp_path / "core.py").write_text("def late():\n    from semmoe.plan import x\n    return x\n")
    (tmp_path / "plan.py").write_text("from semmoe.core import late\nfrom semmoe import solver\n" + "x = 1\n" * 600)
    (tmp_path / "solver.py").write_text("from semmoe.plan import x\n")
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    monkeypatch.setattr(house, "ROOMS", {"core.py": 10, "plan.py": 10})
    assert house.upward() == ["core imports plan", "plan imports solver"]
    assert house.cycles() == ["plan", "solver"]
    found = house.over_budget()
    assert "plan.py has 602 lines, of at most 10" in found
    assert "a file of the package belongs to no room, or to two" in found


def test_a_budget_rises_only_where_others_fall_by_more():
    before = (30, {"a": 10, "b": 20})
    assert house.raised_budgets(before, before) == []
    assert house.raised_budgets(before, (25, {"a": 5, "b": 20})) == []
    assert house.raised_budgets(before, (29, {"a": 15, "b": 14})) == []
    words = "and the others fell by no more"
    assert house.raised_budgets(before, (30, {"a": 15, "b": 15})) == [f"a rose by 5 lines, {words}"]
    assert house.raised_budgets(before, (30, {"a": 10, "c": 20})) == [f"c rose by 20 lines, {words}"]
    assert house.raised_budgets(before, (31, before[1])) == ["the total rose from 30 to 31 lines"]


def test_budgets_are_those_of_the_file():
    assert house.budgets(Path(house.__file__).read_text(encoding="utf-8")) == (house.TOTAL, house.ROOMS)
