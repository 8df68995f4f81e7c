"""The page Answer lengths: versions of each model, with what their tests and the newest requests say."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import GraphVersion, LengthVersion
from controller.predict.answer_lengths import MOST_AGE_S
from controller.predict.pattern_graphs import Call, graph_of, kind_of, set_of
from tests import factories
from tests.console.live.live_data import fleet

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def version(number, model="demo", *, age_s=60.0, **fields):
    at = timezone.now() - timedelta(seconds=age_s)
    passed = {"digest": "0" * 64, "content": b"forest"} if not fields.get("refused") else {}
    given = {
        "model": model, "version": number, "trained_at": at, "first_at": at - timedelta(hours=2), "last_at": at,
        "answers": 9_600, "cut_answers": 120, "judged": 2_400, "coverage": 0.903, "class_coverage": 0.871,
        "pinball": 13.2, "class_pinball": 28.3, **passed, **fields,
    }  # fmt: skip
    return LengthVersion.objects.create(**given)


def shown(client):
    answer = client.get("/lengths/")
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def test_without_models_it_says_so(viewer):
    assert "No models yet" in shown(viewer)


def test_a_model_without_a_version_says_when_there_will_be_one(viewer):
    factories.served_model(name="demo")
    text = shown(viewer)
    assert "no version in use" in text
    assert "Training starts after 500 recorded answers" in text


def test_the_newest_version_that_passed_is_in_use(viewer):
    factories.served_model(name="demo")
    version(1, age_s=3_600)
    version(2)
    version(3, refused="its loss is 30.8 tokens; constant quantiles of each class have a loss of 28.5", age_s=10)
    text = shown(viewer)
    assert "version 2 in use" in text
    assert text.index("failed") < text.index("its loss is 30.8 tokens") < text.rindex("passed")
    assert all(each in text for each in ("90.3 %", "87.1 %", "13.2", "28.3", "9,600", "2,400"))
    assert "None of the 2,000 newest requests has used this version" in text


def test_coverage_by_tokens_produced_is_shown_for_versions_that_have_it(viewer):
    factories.served_model(name="demo")
    version(1)
    assert "Coverage by tokens produced" not in shown(viewer)
    shares = ((0, 2_400, 0.903), (50, 2_100, 0.911), (100, 1_200, 0.88), (200, 1, 1.0), (400, 0, None))
    version(2, coverage_by_tokens=[{"tokens": t, "answers": a, "coverage": c} for t, a, c in shares])
    text = shown(viewer)
    section = text[text.index("Coverage by tokens produced") :]
    assert "0 tokens 50 tokens 100 tokens 200 tokens 400 tokens Version 2 90.3 % 2,400 answers 91.1 %" in section
    assert "88 % 1,200 answers 100 % 1 answer – 0 answers" in section
    assert "Version 1" not in section


def test_coverage_of_the_newest_requests_leaves_out_those_that_were_cut(viewer):
    factories.served_model(name="demo")
    version(2)
    told = {"model": "demo", "length_version": 2, "length_bounds": [5, 20], "length_features": [9.0, 40.0, 0, 0, 0, 0]}
    factories.records_stored(
        *(factories.record(**told, output_tokens=tokens) for tokens in (10, 20, 21, 5)),
        factories.record(**told, output_tokens=40),  # the most that it could have
        factories.record(**told, output_tokens=3, outcome="cancelled"),
        factories.record(**{**told, "length_version": 1}, output_tokens=39),
    )
    assert "4 used this version and ended by themselves; the upper bound covered 75 % of them" in shown(viewer)


def test_a_version_that_is_too_old_is_not_in_use(viewer):
    factories.served_model(name="demo")
    version(1, age_s=MOST_AGE_S + 60)
    text = shown(viewer)
    assert "too old" in text
    assert "more than 7 days old and is not used" in text
    assert "in use since" not in text


def test_no_version_has_passed(viewer):
    factories.served_model(name="demo")
    version(1, refused="it covers 0.612 of later answers; constant quantiles of each class cover 0.900")
    assert "No version has passed its test" in shown(viewer)


def test_a_request_shows_what_was_predicted_and_which_version_said_so(viewer):
    record = factories.record(
        length_version=2, length_bounds=[5, 1_200], output_tokens=90, refined_bounds=[50, 60, 1_000]
    )
    factories.records_stored(record, other := factories.record())
    page = viewer.get(f"/requests/{record.id}/").content.decode()
    assert "5 to 1,200" in page
    assert "last predicted after 50 tokens: 60 to 1,000" in page
    assert 'href="/lengths/">version 2</a>' in page
    assert "Predicted tokens out" not in viewer.get(f"/requests/{other.id}/").content.decode()


def graph_version(number, tenant="acme", *, age_s=60.0, **fields):
    at = timezone.now() - timedelta(seconds=age_s)
    passed = {"digest": "0" * 64, "content": b"graphs"} if not fields.get("refused") else {}
    given = {
        "tenant": tenant, "version": number, "trained_at": at, "first_at": at - timedelta(hours=2), "last_at": at,
        "workflows": 1_200, "graphs": 480, "judged": 300, "matched": 0.914, "error": 0.042, "even_error": 0.131,
        **passed, **fields,
    }  # fmt: skip
    return GraphVersion.objects.create(**given)


def test_pattern_graphs_of_each_tenant_are_shown_once_there_are_any(viewer):
    assert "Pattern graphs" not in shown(viewer)
    graph_version(1, age_s=7_200)
    graph_version(2)
    graph_version(3, refused="wrong by 0.300 of the time left, equal shares by 0.131", age_s=10)
    text = shown(viewer)
    section = text[text.index("Workflows from") :]
    assert section.index("failed") < section.index("in use") < section.index("passed")
    assert "wrong by 0.300 of the time left" in section
    assert all(each in section for each in ("1,200", "480", "91.4 %", "4.2 %", "13.1 %"))


def test_pattern_graphs_that_are_too_old_are_said_not_to_be_used(viewer):
    graph_version(1, age_s=MOST_AGE_S + 60)
    text = shown(viewer)
    assert "too old" in text
    assert "in use" not in text


def learned(what, subject, version, digest, taken_at, problem=""):
    told = {"what": what, "subject": subject, "version": version, "digest": digest, "problem": problem}
    return told | {"taken_at": taken_at and taken_at.timestamp()}


def test_gateways_that_use_another_version_are_told_from_those_that_took_it_over(viewer, live_store):
    factories.served_model(name="demo")
    version(1, digest="a" * 64, age_s=3_600)
    row = version(2, digest="b" * 64)
    took = row.trained_at + timedelta(seconds=2.5)
    now = timezone.now().timestamp()
    old = learned("lengths", "demo", 1, "a" * 64, took)
    live_store.fleets = [
        fleet(gateway="gw-a", at=now, learned=[learned("lengths", "demo", 2, "b" * 64, took)]),
        fleet(gateway="gw-b", at=now, learned=[old]),
        fleet(gateway="gw-c", at=now, learned=[learned("lengths", "demo", None, "", None, "it is damaged")]),
        fleet(gateway="gw-d", at=now - 60, learned=[old]),
        fleet(gateway="gw-e", at=now),
        fleet(gateway="gw-f", at=now, learned=[]),
    ]
    text = shown(viewer)
    rows = {name: text[text.index(f"gw-{name} ") :].split("gw-")[1] for name in "abcdef"}
    assert "a 2 up to date" in rows["a"]
    assert "2.50 s after training" in rows["a"]
    assert "bbbbbbbbbbbb" in rows["a"]
    assert "b 1 outdated" in rows["b"]
    assert "after training" not in rows["b"]
    assert "c – outdated newest version not used: it is damaged" in rows["c"]
    assert "not reporting since" in rows["d"]
    assert "e – unknown" in rows["e"]
    assert "f – outdated" in rows["f"]


def test_a_version_of_a_moment_ago_is_expected_at_gateways_and_none_outdated(viewer, live_store):
    factories.served_model(name="demo")
    version(1, age_s=3.0)
    live_store.fleets = [fleet(gateway="gw-a", at=timezone.now().timestamp(), learned=[])]
    text = shown(viewer)
    assert "new version expected" in text
    assert "outdated" not in text


def test_without_redis_the_page_says_that_gateways_versions_are_not_known(viewer, live_store):
    factories.served_model(name="demo")
    version(1)
    live_store.away = True
    assert "It is not known which versions gateways use." in shown(viewer)
    live_store.away = False
    assert "No gateway is reporting." in shown(viewer)


def test_gateways_are_shown_beside_the_pattern_graphs_in_use(viewer, live_store):
    row = graph_version(1, digest="c" * 64)
    now = timezone.now().timestamp()
    told = learned("graphs", "acme", 1, "c" * 64, row.trained_at)
    live_store.fleets = [fleet(gateway="gw-a", at=now, learned=[told]), fleet(gateway="gw-b", at=now, learned=[])]
    text = shown(viewer)
    assert "gw-a since" in text
    assert "gw-b: outdated" in text


def test_the_graphs_in_use_are_shown_call_by_call_with_what_each_follows(viewer):
    calls = [Call(kind_of("demo", name), at, at + 2, 500, 100) for name, at in (("plan", 0), ("a", 3), ("b", 3.5))]
    graph_version(1, content=set_of([graph_of(calls)], [4.0], {}).to_bytes())
    factories.records_stored(
        factories.record(tenant="acme", workflow="w", model="demo", stage="plan", arrived_at=time.time())
    )
    assert 'href="/lengths/graphs/?tenant=acme"' in viewer.get("/lengths/").content.decode()
    answer = viewer.get("/lengths/graphs/?tenant=acme")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))
    assert answer.status_code == 200
    assert "Stands for 4 workflows" in text
    assert "without the parents that clients name" in text
    assert "1 plan (demo) – 1 " in text
    assert f"3 {kind_of('demo', 'b'):08x} 1 2 " in text


@pytest.mark.parametrize("query", ["", "?tenant=nobody", "?tenant=%00", f"?tenant={'x' * 500}"])
def test_a_tenant_without_graphs_in_use_is_told_so(viewer, query):
    answer = viewer.get(f"/lengths/graphs/{query}")
    assert answer.status_code == 200
    assert "No pattern graphs in use" in answer.content.decode()
