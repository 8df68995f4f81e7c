"""Every figure that code of ours puts into a record has a name in words and a unit: read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from django.apps import apps

from controller.core.snapshot import LevelBounds
from controller.services.change import HIDDEN
from controller.services.experiments.commands import EDITABLE as OF_EXPERIMENTS
from controller.slo.mapping import CONTENTION_RULES
from controller.slo.workflow import GRAPH, LAST, STAGES, STEPS_LEFT
from controller.wording.measures import number
from controller.wording.values import VALUES
from controller.wording.vocabulary import NAMES, figure, line, named, shown

ROOT = Path(__file__).parents[3]
DECIDE = (
    "controller/dispatch", "controller/scale", "controller/slo", "controller/services", "controller/admin",
    "api/openai", "api/control", "workers", "console",
)  # fmt: skip
# What figures are called where they are gathered, and who takes them.
HOLDERS = {"figures", "inputs", "outcome", "served", "plan", "attempts", "filter", "tried", "before", "after"}
MAKERS = {
    "figures", "_figures", "_inputs", "outcome", "_outcome", "_failure", "progress", "queue_command_outcome", "_seen",
    "infeasible", "_named",
}  # fmt: skip
TAKERS = {
    "Decision",
    "refuse",
    "decision_record",
    "action_end",
    "_decide",
    "_audit",
    "audit",
    "_served",
    "Done",
    "_end",
}
# Gathered under one of these names, and no record of a decision.
OTHER = {
    "console/charts/experiments.py", "console/forms/experiments.py", "console/views/site/patterns.py",
    "console/views/configuration/previews.py", "console/views/traffic/requests.py", "console/live/live_view.py",
    "workers/engine", "workers/backends", "workers/experiments/runner.py", "controller/services/experiments/specs.py",
}  # fmt: skip
UNITS = {
    "", "s", "share", "times", "at", "word", "code", "codes", "requests", "tokens", "instances", "days", "bytes",
    "bytes/s", "requests/s", "requests/min", "tokens/min", "units/s",
}  # fmt: skip
# Audited only with what their own services name, or not at all.
NOT_AUDITED_WHOLE = {
    "Decision", "InstanceDevice", "InstanceInterval", "Action", "Transfer", "ConfigVersion", "Trace", "Experiment",
    "ExperimentRun", "InstanceLink", "KvTransfer", "RequestRecord", "AttainmentMinute", "ScalerState", "ScalingSample",
    "PersonSession", "LengthVersion", "GraphVersion", "GoodputMinute", "WorkflowResult",
    "LearnedTakeover",
}  # fmt: skip


def _name(node: ast.AST) -> str:
    """Of a variable, an attribute, or `params["plan"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _texts(node: ast.AST | None) -> Iterator[str]:
    """Of a constant, of a choice between some, or of all in a tuple."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))
    elif isinstance(node, ast.Tuple):
        for each in node.elts:
            yield from _texts(each)


def _keys(node: ast.AST | None) -> Iterator[str]:
    """Of all objects written out in an expression, however deep; not of what a call in it is given."""
    if node is None or isinstance(node, ast.Call):
        return
    if isinstance(node, ast.Dict):
        for each in node.keys:
            yield from _texts(each)
    if isinstance(node, ast.DictComp):
        for each in node.generators:
            yield from _texts(each.iter)
    for inner in ast.iter_child_nodes(node):
        yield from _keys(inner)


def _of_call(node: ast.Call, extra: dict[str, set[str]]) -> Iterator[str]:
    name = _name(node.func)
    for argument in node.args if name in TAKERS else ():
        yield from _keys(argument)
    for keyword in node.keywords:
        if keyword.arg in HOLDERS:
            yield from _keys(keyword.value)
        elif name in extra and keyword.arg and keyword.arg not in extra[name]:
            yield keyword.arg  # `**more: Figure` of a function takes figures by keyword


def _of_function(node: ast.FunctionDef) -> Iterator[str]:
    """Of one that is named for its figures all that it builds, of one that is said to return some what it returns."""
    makes = node.name in MAKERS
    if not makes and (node.returns is None or "Figure" not in ast.unparse(node.returns)):
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return) or (makes and isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign)):
            yield from _keys(inner.value)


def _recorded(tree: ast.AST) -> Iterator[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    extra = {
        each.name: {argument.arg for argument in [*each.args.args, *each.args.kwonlyargs]}
        for each in functions
        if each.args.kwarg and "Figure" in ast.unparse(each.args.kwarg)
    }
    for each in functions:
        yield from _of_function(each)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node, extra)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if _name(target) in HOLDERS:
                    yield from _keys(node.value)
                if isinstance(target, ast.Subscript) and _name(target.value) in HOLDERS:
                    yield from _texts(target.slice)


@cache  # all of the source is read
def recorded() -> dict[str, str]:
    """Key to one file that records it."""
    found = {}
    for folder in DECIDE:
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if not any(place.startswith(each) for each in OTHER):
                for key in _recorded(ast.parse(path.read_text())):
                    found[key] = place
    return found


def configured() -> dict[str, str]:
    """Key to the table whose rows are recorded with it, before and after a change."""
    found = dict.fromkeys((field.name for field in fields(LevelBounds)), "levels of a mapping") | dict.fromkeys(
        OF_EXPERIMENTS, "experiment"
    )
    for model in apps.get_app_config("controller").get_models():
        if model.__name__ not in NOT_AUDITED_WHOLE:
            names = [field.name for field in model._meta.concrete_fields if field.name not in HIDDEN]
            found |= dict.fromkeys(names, model.__name__)
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {"waited_s", "token_budget", "bound", "attempts", "command"},  # dispatcher
        {"starts_in_s", "hopeless", "decode_step_s", "field"},  # lane
        {"kv_tokens", "slack_s", "failures"},  # migrator
        {"measured_by", "early_bytes", "overlap_s", "undo"},  # gateway: transfers
        {"by_code", "by_class"},  # gateway: refusals
        {"reference_ttft_s", "queue_correction_s"},  # targets
        {"wait_over_slo", "snapshot_age_s", "cooldown_left_s", "wanting_load"},  # scaler
        {"source_utilisation", "first_served_s", "load_s", "tries", "asleep_s", "switch_s"},  # jobs
        {"since_desired_s", "failures_5min", "down_s", "gone"},  # lifecycle, links, retention
        {"matched", "applied", "needed", "is_staff", "span_s", "compares"},  # people
    ],
)
def test_the_search_finds_what_is_there(keys):
    assert keys <= recorded().keys()


def test_the_search_sees_each_way_of_recording():
    source = """
def make(more) -> dict[str, Figure]:
    return {"returned": 1}
def note(self, place, **more: Figure): ...
def act():
    figures = {"bound": 1, "deep": {"inner": 2}}
    figures |= {"added": 1}
    figures["set" if more else "other"] = 1
    figures |= {name: seen[name] for name in ("one", "two")}
    note(place, error=1)
    record(outcome={"given": 1} | other)
    Decision("kind", "reason", "id", now, {"passed": 1})
    context = {"page": 1}
    record(outcome=read({"asked": 1}))
"""
    found = set(_recorded(ast.parse(source)))
    assert found == {
        "returned",
        "bound",
        "deep",
        "inner",
        "added",
        "set",
        "other",
        "one",
        "two",
        "error",
        "given",
        "passed",
    }


def test_every_figure_has_a_name_and_a_unit():
    assert {key: where for key, where in {**configured(), **recorded()}.items() if key not in NAMES} == {}


def test_every_table_is_audited_or_said_not_to_be():
    known = {model.__name__ for model in apps.get_app_config("controller").get_models()}
    assert known >= NOT_AUDITED_WHOLE


def test_a_name_is_words_and_a_unit_is_one_we_can_say():
    assert {key: name for key, (name, _) in NAMES.items() if not name or "_" in name} == {}
    assert {key: unit for key, (_, unit) in NAMES.items() if unit not in UNITS} == {}


def test_a_key_that_names_its_unit_has_that_unit():
    """`_s` is a time, `_bytes_s` a rate, `_at` a moment; `sleeps_at` is a level."""
    said = {"bytes_s": "bytes/s", "_s": "s", "_at": "at", "bytes": "bytes", "_tokens": "tokens"}
    for key, (_, unit) in NAMES.items():
        meant = next((wanted for ending, wanted in said.items() if key.endswith(ending)), unit)
        assert unit == meant or key == "sleeps_at", key


def test_no_name_is_left_that_nothing_is_recorded_under():
    of_pages = {"judged_by"}
    old = {
        "pace_s",
        "fit_errors",
        "prefill_median_error",
        "prefill_p95_error",
        "decode_median_error",
        "decode_p95_error",
    }
    known = {**configured(), **recorded()}
    assert {key for key in NAMES if key not in known} <= of_pages | old


def test_every_rule_of_contention_has_words():
    assert VALUES["contention"].keys() == set(CONTENTION_RULES)


def test_every_basis_of_a_share_has_words():
    assert VALUES["shared_by"].keys() == {GRAPH, LAST, STAGES, STEPS_LEFT}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("slack_s", -4.3, "−4.3 s"),
        ("slack_s", 0.0125, "12.5 ms"),
        ("cooldown_s", 86_400.0, "86,400 s"),
        ("waited_s", 0.99999, "1 s"),
        ("waited_s", 0, "0 s"),
        ("probability", 0.0, "0 %"),
        ("target", 0.9995, "99.95 %"),
        ("target", "decode-1", "decode-1"),
        ("queued", 1, "1 request"),
        ("queued", 1234, "1,234 requests"),
        ("rpm", 1, "1 request/min"),
        ("processing_rate", 32.04, "32.04 requests/s"),
        ("unit_cost", 1.0, "1 unit/s"),
        ("wait_over_slo", 7.143, "714.3 %"),
        ("bandwidth_bytes_s", 1.25e10, "12.5 GB/s"),
        ("bytes", 4096, "4.1 kB"),
        ("tick", 12345, "12345"),
        ("token_budget", None, "–"),
        ("paused", False, "no"),
        ("state", "being_moved", "being moved"),
        ("commonest", "no_capacity", "refused: no instance was up"),
        ("contention", "strict", "always those of each level"),
        ("shared_by", "graph", "a recorded workflow like it"),
        ("expires_at", "2026-11-22T05:33:02+00:00", "2026-11-22 05:33:02 UTC"),
        ("until", 0.5, "1970-01-01 00:00:00 UTC"),
        ("before", "not a time", "not a time"),
        ("by_code", {"no_capacity": 3}, "refused: no instance was up: 3"),
        ("by_class", {"acme/chat": 1}, "acme/chat: 1 request"),
        ("levels", [{"ttft_s": 0.5}], "0 (TTFT target 500 ms)"),
        ("started", ["a", "b"], "a, b"),
        ("request_ids", [], "none"),
        ("someones_own", 2.5, "2.5"),
    ],
)
def test_values_are_said_with_their_units(key, value, text):
    assert shown(key, value) == text


def test_a_figure_is_said_in_words_and_kept_as_recorded():
    assert figure("slack_s", -4.3) == ("time left to its TTFT target", "−4.3 s", "slack_s: -4.3")
    assert named("moon_phase") == "moon phase"
    said = line({"slack_s": 1.2, "policy": "baseline", "hopeless": True, "queued": 11})
    assert said == (
        "time left to its TTFT target 1.2 s · policy: baseline · TTFT target already missed: yes · queue 11 requests"
    )
    assert len(figure("error", "x" * 1000).raw) == 300


def test_a_number_keeps_what_tells_it_from_its_neighbour():
    assert number(0.0125, "s") != number(0.0126, "s")
    assert number(125.0, "s") != number(130.0, "s")
    assert number(0.999, "share") != number(0.9995, "share")
