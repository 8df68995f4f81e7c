"""The table of a request's states: what the page draws, and that dispatcher, migrator and scheduler keep to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.lifecycle import ENDS, OPEN, STEPS, TWO_STAGES, Cause, OpenRequest, State, after
from tests.controller.dispatch.fleet import request

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = DOCS / "reference/request-lifecycle.md"
OVERVIEW = DOCS / "concepts/disaggregation.md"
ARROW = re.compile(r"^ +(\w+) --> (\w+): (.+)$", re.M)
END = re.compile(r"^\| `([^`]+)` \| (\w+) \| (\w+) \| (\w+) \| (?:as decided |`(\w+)` )?\|$", re.M)
ROW = re.compile(r"^\| `([^`]+)` \| ([\w, ]+) \| (\w+) \|", re.M)


def test_the_page_shows_the_table() -> None:
    page, _, _ = PAGE.read_text().partition("## Outcomes")
    shown = [(before, on, to) for before, to, ons in ARROW.findall(page) for on in ons.split(", ")]
    shown += [(before, on, to) for on, befores, to in ROW.findall(page) for before in befores.split(", ")]
    assert sorted(shown) == sorted((step.state.value, step.on, step.to.value) for step in STEPS)


def test_the_simpler_diagram_has_no_arrow_of_its_own() -> None:
    shown = {(before, to) for before, to, _ in ARROW.findall(OVERVIEW.read_text())}
    assert shown <= {(step.state.value, step.to.value) for step in STEPS}
    assert {before for before, _ in shown} == {State.QUEUED, *TWO_STAGES}


def test_the_page_shows_the_outcomes() -> None:
    shown = {cause: tuple(rest) for cause, *rest in END.findall(PAGE.read_text())}
    assert shown == {cause.value: (*map(str, end[:3]), end.code) for cause, end in ENDS.items()}
    assert set(ENDS) == set(Cause)


def test_nothing_leads_to_two_states() -> None:
    assert len({(step.state, step.on) for step in STEPS}) == len(STEPS)


def test_every_state_is_reached_and_left_but_the_last() -> None:
    assert {step.to for step in STEPS} == {*State}
    assert {step.state for step in STEPS} == {*OPEN} == {*State} - {State.ENDED}


@pytest.mark.parametrize("state", OPEN)
def test_a_client_may_always_hang_up(state: State) -> None:
    assert after(state, "Cancelled") is State.ENDED


@pytest.mark.parametrize("state", sorted({*TWO_STAGES} - {State.COMMITTED, State.RELEASED}))
def test_each_state_before_the_kv_is_there_has_a_time_out(state: State) -> None:
    assert hasattr(MigratorConfig(), f"{state.value}_timeout_s")


def imports_states(tree: ast.Module) -> bool:
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(
        node.module == "controller.dispatch.lifecycle" and "State" in {a.name for a in node.names} for node in froms
    )


def kept_states(tree: ast.Module) -> list[int]:
    """Lines that set an attribute `state`, or declare a field of the table's type."""
    lines = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        sets = any(isinstance(target, ast.Attribute) and target.attr == "state" for target in targets)
        declares = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("State")
        lines += [node.lineno] if sets or declares else []
    return lines


def test_only_the_table_changes_a_state() -> None:
    """Gateway, simulator and migrator read it: whoever knows the states keeps none of its own."""
    paths = [path for top in ("api", "controller", "console", "workers") for path in (ROOT / top).rglob("*.py")]
    readers = {path.name: tree for path in paths if imports_states(tree := ast.parse(path.read_text()))}
    assert {"runtime.py", "kv_transfers.py", "transfers.py", "migrator.py", "scheduler.py"} <= readers.keys()
    assert {name: lines for name, tree in readers.items() if (lines := kept_states(tree))} == {}
    assert kept_states(ast.parse("class Opened:\n    state: State\nopened.state = State.MOVING")) == [3, 2]


def test_what_does_not_apply_changes_nothing() -> None:
    waits = OpenRequest(request("a"))
    assert not waits.follow("TransferDone")
    assert waits.state is State.QUEUED
