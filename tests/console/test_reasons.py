"""Every reason that code of ours gives for a decision has words: read off the source, so that none is forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.sentences import SENTENCES, say
from console.words import REASONS, SOURCES

ROOT = Path(__file__).parents[2]
DECIDE = ("controller/dispatch", "controller/scale", "controller/services", "api/openai", "workers")
# Who takes a reason, and at which position.
TAKES = {
    "Decision": 1, "refuse": 2, "Mark": 2, "_mark": 3, "Replace": 1, "StopWanted": 1, "_Verdict": 0, "_start": 0,
    "_drain": 1, "_decide": 2, "_give_up": 1, "Choice": 1,
}  # fmt: skip
NAMES = ("reason", "held_by")
ENDINGS = ("asked",)  # completed by who acted: person_asked
SILENT = ("steady",)  # a state of mind that leaves no decision
CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _codes(node: ast.expr) -> Iterator[str]:
    """Of an expression that is a code, or chooses between some."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _codes(node.body)
        yield from _codes(node.orelse)


def _given(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = TAKES.get(name)
            if place is not None and len(node.args) > place:
                yield from _codes(node.args[place])
            for keyword in node.keywords:
                if keyword.arg in NAMES:
                    yield from _codes(keyword.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", "") in NAMES for target in targets):
                yield from _codes(node.value)


def reasons() -> dict[str, str]:
    """Code to one file that gives it."""
    found = {}
    for folder in DECIDE:
        for path in (ROOT / folder).rglob("*.py"):
            if "workers/engine" not in str(path):
                for code in _given(ast.parse(path.read_text())):
                    found[code] = str(path.relative_to(ROOT))
    return found


def test_the_search_finds_what_is_there():
    found = reasons()
    assert {"no_instance", "fits_budget", "below_min", "nothing_to_start", "exited", "fits_tpot"} <= found.keys()
    assert len(found) > 30


def test_every_reason_has_words():
    known = REASONS.keys() | SOURCES.keys() | set(SILENT) | set(ENDINGS)
    assert {code: where for code, where in reasons().items() if code not in known} == {}


def test_every_reason_is_documented():
    text = (ROOT / "docs/reasons.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == REASONS | SOURCES, "docs/reasons.md has a row for each code of console/words.py, in its words"


@pytest.mark.parametrize(("kind", "reason"), sorted(SENTENCES))
def test_every_sentence_is_filled_in_with_figures(kind: str, reason: str):
    pattern = SENTENCES[kind, reason]
    wanted = set(re.findall(r"{(\w+)", pattern)) - {"actor", "subject"}
    figures = dict.fromkeys(wanted, 1.5)
    said = say(kind, "scaler", "instance", "demo", reason, figures)
    assert "{" not in said
    assert said == pattern.format_map({**figures, "actor": "scaler", "subject": "demo"})


def test_an_engine_that_ended_reads_with_who_takes_its_place():
    known = {"replacement": "reference-9", "error": "exit code 137", "failures_5min": 1, "pause_s": 0.0}
    said = say("instance_replaced", "reconciler", "instance", "engine-1", "exited", known)
    assert said == (
        "reconciler puts reference-9 in the place of engine-1, whose process ended (exit code 137); "
        "1 such within five minutes, so it waits 0 s"
    )
    held = say("instance_replaced", "reconciler", "instance", "engine-1", "exited", {"held": "no_device"})
    assert held == "reconciler replaced instance engine-1: its process ended"
