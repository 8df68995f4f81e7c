"""*Workflows*: each counts once, by its own deadline, from the records of its requests."""

from __future__ import annotations

import time

import pytest
from django.urls import reverse

from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def call(workflow, ago_s, took_s=1.0, left_s=None, **fields):
    """A request of it. `left_s`: what its gateway found to be left of the workflow's deadline."""
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": left_s}}
    decisions = [step] if left_s is not None else []
    return factories.record(
        workflow=workflow, arrived_at=time.time() - ago_s, e2e_s=took_s, decisions=decisions, **fields
    )


def shown(client, query=""):
    answer = client.get(reverse("workflows") + query)
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def test_without_any_the_page_says_how_to_make_one(viewer):
    assert "No workflows in the last hour" in shown(viewer)


def test_each_counts_once_and_by_its_own_deadline(viewer):
    factories.records_stored(
        call("in-time", 100, left_s=60, stage="plan"), call("in-time", 90, left_s=50, stage="write"),
        call("in-time", 80, left_s=40, stage="plan"),
        call("was-late", 100, left_s=10), call("was-late", 95, took_s=7.5, left_s=5),
        call("broke", 50, left_s=100), call("broke", 40, left_s=90, outcome="refused", attained=False),
        call("runs", 5, left_s=3600),
        call("free", 5),
        call("", 5), call("long-ago", 4000, left_s=10),
    )  # fmt: skip
    text = shown(viewer)
    assert "1 of 3 workflows whose deadline has passed, or that missed it before, were in time" in text
    rows = {
        name: text.split(f">{name}</a>")[1].split("</tr>")[0]
        for name in ("in-time", "was-late", "broke", "runs", "free")
    }
    assert '<span class="met">in time</span>' in rows["in-time"]
    assert ">plan, write<" in rows["in-time"]
    assert ">3<" in rows["in-time"]
    assert "2.50 s late" in rows["was-late"]
    assert "1 not answered" in rows["broke"]
    assert "in time so far" in rows["runs"]
    assert "no deadline" in rows["free"]
    assert "long-ago" not in text


def test_workflows_of_two_tenants_are_two(viewer):
    factories.records_stored(call("same", 10, left_s=5), call("same", 9, left_s=60, tenant="other"))
    text = shown(viewer)
    assert text.count(">same</a>") == 2
    assert "tenant=other&amp;workflow=same" in text


def test_many_are_paged(viewer):
    factories.records_stored(*(call(f"w{number:03}", 10 + number) for number in range(120)))
    first, last = shown(viewer), shown(viewer, "?page=99")
    assert "Page 1 of 3, 120 workflows" in first
    assert ">w000</a>" in first
    assert "Page 3 of 3" in last
    assert ">w119</a>" in last


def test_a_workflow_in_html_is_text(viewer):
    factories.records_stored(call("<script>x</script>", 10))
    text = shown(viewer)
    assert "<script>x</script>" not in text
    assert "workflow=%3Cscript%3E" in text


def test_the_link_of_a_workflow_lists_its_requests(viewer):
    factories.records_stored(call("mine", 10, id="a"), call("mine", 9, id="b"), call("other", 8, id="c"))
    listed = viewer.get("/requests/?tenant=acme&workflow=mine").content.decode()
    assert [name for name in "abc" if f'href="/requests/{name}/"' in listed] == ["a", "b"]
