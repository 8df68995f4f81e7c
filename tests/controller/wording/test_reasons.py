"""Every reason that code of ours gives for a decision has words: read off the source, so that none is forgotten."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from api.control.access.refusals import REASONS as REFUSALS
from api.openai.protocol.errors import KINDS
from controller.core.types import Outcome
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.lifecycle import State
from controller.services.fleet.sleeping import LEVELS
from controller.wording.sentences import SENTENCES, say
from controller.wording.vocabulary import REASONS, SOURCES
from tests.controller.wording.reason_search import Source, read
from workers.engine.weights.manager import KINDS as WEIGHT_SOURCES

ROOT = Path(__file__).parents[3]
PARTS = (
    "controller/core",
    "controller/dispatch",
    "controller/scale",
    "controller/services",
    "api",
    "workers",
    "console",
)
# An engine's own words (why a text ended, why a request waits) are no reasons of ours, but for those about moved KV;
# nor are OpenAI's, or what a timeline marks, or why a server closes a connection (`/metrics` counts those).
LEFT_OUT = re.compile(
    r"workers/engine/(?!kv/(?!disaggregation))|workers/http/|api/openai/protocol/response|console/panels/timeline"
)
# What a reason that is put together may be. Who acted, and what was done, stands beside it: person_created.
FILLED = {
    "*_*": (),
    "*_timeout": tuple(
        name.removesuffix("_s") for name in MigratorConfig.__dataclass_fields__
        if name.removesuffix("_timeout_s") in set(State)
    ),
    "from_*": tuple(f"from_{kind}" for kind in WEIGHT_SOURCES),
    "level_*": tuple(f"level_{level}" for level in LEVELS),
}  # fmt: skip
SILENT = ("steady", "not_idle")  # a state of mind that leaves no decision; an engine that is asked once more
# Not to be found at a place that takes a reason: codes that clients get, ends of a request, refusals by their
# exception, a link that rules out a source of weights, of several such sources the first, and how KV stayed behind.
ELSEWHERE = {
    *(*KINDS, *Outcome, *(code for _, code in REFUSALS)),
    *("link_down", "same_host", "widest_link", "link_unknown", "left_to_lease"),
}


@cache  # all of the source is read
def reasons() -> dict[str, str]:
    """Code to one file that gives it."""
    found = read(ROOT, PARTS, LEFT_OUT).reasons()
    whole = {code: where for code, where in found.items() if "*" not in code}
    return whole | {code: found[made] for made in found if "*" in made for code in FILLED[made]}


def test_the_search_finds_what_is_there():
    """By each of its ways: positions, keywords, constants, conditionals, names, tables, functions, f-strings."""
    found = reasons().keys()
    assert {"no_instance", "fits_budget", "below_min", "nothing_to_start", "exited", "fits_tpot"} <= found
    assert {"timeout", "not_supported", "never_served", "no_device", "not_enabled", "asleep_otherwise"} <= found
    assert {"woken", "stays_awake", "host_copy", "from_disk", "level_2", "moving_timeout", "slow_decode"} <= found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('end(1, "a_code")', {"a_code"}),
        ('end(1, reason="a_code" if x else f"from_{x}")', {"a_code", "from_*"}),
        ('def f():\n    why = x or TABLE.get(x, "rest")\n    end(1, why)', {"left", "right", "rest"}),
        ("end(1, told(x))", {"here", "there"}),
        ('end(1, CONSTANT); Ended(1, "by_field"); Refused("by_init")', {"at_top", "by_field", "by_init"}),
        ('thing.end(1, "Not a code."); end("no_reason", x); other("a_code")', set()),
    ],
)
def test_the_search_follows_what_is_handed_on(code: str, found: set[str]):
    given = """
CONSTANT = "at_top"
TABLE = {1: "left", 2: "right"}
def end(self_id, reason): ...
def told(x) -> str:
    return "here" if x else "there"
class Ended:
    number: int
    reason: str
class Refused(Exception):
    def __init__(self, reason): ...
"""
    assert set(Source({"given.py": ast.parse(given + code)}).reasons()) == found


def test_every_reason_has_words():
    known = REASONS.keys() | SOURCES.keys() | set(SILENT)
    assert {code: where for code, where in reasons().items() if code not in known} == {}


def test_no_word_is_left_of_a_reason_that_no_one_gives():
    assert REASONS.keys() - reasons().keys() - ELSEWHERE == set()


def test_every_reason_is_documented():
    text = (ROOT / "docs/reference/reasons.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \| (.+) \|$", text, re.MULTILINE))
    assert rows == REASONS | SOURCES, "one row for each code of controller/wording/vocabulary.py"


@pytest.mark.parametrize(("kind", "reason"), sorted(SENTENCES))
def test_every_sentence_is_filled_in_with_figures(kind: str, reason: str):
    pattern = SENTENCES[kind, reason]
    wanted = set(re.findall(r"{(\w+)", pattern)) - {"actor", "subject"}
    figures = dict.fromkeys(wanted, 1.5)
    said = say(kind, "scaler", "instance", "demo", reason, figures)
    assert "{" not in said
    percent = dict.fromkeys(wanted & {"load", "upper", "lower"}, 150.0)
    assert said == pattern.format_map({**figures, **percent, "actor": "scaler", "subject": "demo"})


def test_an_engine_that_ended_reads_with_who_takes_its_place():
    known = {"replacement": "reference-9", "error": "exit code 137", "failures_5min": 1, "pause_s": 0.0}
    said = say("instance_replaced", "reconciler", "instance", "engine-1", "exited", known)
    assert said == (
        "reconciler is replacing engine-1, whose process exited (exit code 137), with reference-9; it starts in 0 s "
        "(failures in the last 5 min: 1)"
    )
    held = say("instance_replaced", "reconciler", "instance", "engine-1", "exited", {"held": "no_device"})
    assert held == "reconciler replaced instance engine-1: its process exited"
