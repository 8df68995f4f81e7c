"""The files of ours that a Decision passes, from the scaler that takes it to the page that shows it.

A traced run: a file counts when one of its functions holds the decision, in whatever shape, or helps to put it into
words. `pytest tests/console/test_decision_walk.py -s` prints the list.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from console.consumers.decisions import DecisionsConsumer
from controller.core.decisions import Decision
from controller.models import Decision as Row
from tests.workers.tasks.conftest import policy, two  # noqa: F401 - fixtures
from tests.workers.tasks.test_scaling import fleet
from workers import live
from workers.tasks import scaling

ROOT = Path(__file__).parents[2]
PARTS = ("api", "console", "controller", "workers")
MOST = 17
# Where its shapes and its words are defined: a reader opens these too, and no function of theirs runs.
DEFINED = (
    "controller/core/decisions.py",
    "controller/models/decisions.py",
    "controller/wording/vocabulary.py",
)
SCRIPTS = ("static/js/pages/overview.js", "static/js/live.js")  # no trace of Python sees them


def is_decision(value: Any) -> bool:
    """In any of its shapes: the core's, the stored row, the message and the page's line."""
    return isinstance(value, Decision | Row) or (isinstance(value, dict) and {"id", "at", "sentence"} <= value.keys())


def holds(values: list[Any]) -> bool:
    return any(is_decision(each) or (isinstance(each, list) and each and is_decision(each[0])) for each in values)


@contextmanager
def walked(words: bool) -> Iterator[list[str]]:
    """Files of ours that had the decision; with `words` those as well that put it into words."""
    found: dict[str, None] = {}

    def seen(frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        name = str(Path(frame.f_code.co_filename).relative_to(ROOT))
        if name.startswith(PARTS) and ((words and "/wording/" in name) or holds([*frame.f_locals.values(), result])):
            found[name] = None

    files: list[str] = []
    sys.setprofile(seen)
    try:
        yield files
    finally:
        sys.setprofile(None)
        files += found


@pytest.mark.django_db
def test_a_decision_passes_few_files_on_its_way_to_the_page(policy, two, viewer, live_store, monkeypatch):  # noqa: F811
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(scaling, "fleet_or_nothing", lambda: fleet(0.95, *two))
    monkeypatch.setattr(live, "send_to_group", lambda group, event: sent.append(event))
    with walked(words=True) as made:
        scaling.tick()
        consumer = DecisionsConsumer()
        assert consumer.take(sent[0]["message"])
        (line,) = consumer.frame(snapshot=True)["decisions"]
    with walked(words=False) as painted:  # the page lists others beside it, in words of theirs
        page = viewer.get("/")
    assert line["sentence"] in page.content.decode()
    shown = dict.fromkeys(f"templates/{each.name}" for each in page.templates if "decision" in (each.name or ""))
    walk = sorted({*DEFINED, *made, *painted, *shown, "templates/console/overview.html", *SCRIPTS})
    print(f"\n{len(walk)} files:", *walk, sep="\n  ")
    assert len(walk) <= MOST
