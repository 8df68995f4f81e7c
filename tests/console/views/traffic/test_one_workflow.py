"""*Workflows* with what gateways keep in Redis: filters, one workflow with its shares, cancelling, without Redis."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from django.conf import settings
from django.urls import reverse

from console.views.traffic.workflows import MOST_DRAWN
from controller.models import Decision
from tests import factories
from workers import live
from workers.workflows import BY_TENANT, CountRequests, OpenWorkflow, Stage, cancel_workflow, read_workflow, run_orders

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def board(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@pytest.fixture
def no_redis(settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"


@pytest.fixture
def acme(db):
    return factories.tenant(name="acme")


def begin(name, deadline_s=60.0, stages=()):
    live.run(run_orders([OpenWorkflow("acme", name, deadline_s, tuple(Stage(*each) for each in stages))]))


def call(workflow, ago_s, took_s, left_s=None, steps_left=1, **fields):
    figures = {"left_s": left_s, "steps_left": steps_left}
    if left_s is not None and left_s > 0:
        figures["step_s"] = left_s / steps_left
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": figures}
    return factories.record(
        workflow=workflow,
        arrived_at=time.time() - ago_s,
        e2e_s=took_s,
        decisions=[] if left_s is None else [step],
        **fields,
    )


def ended_with(reason, workflow):
    found = call(workflow, 30, 1.0, left_s=5, outcome="cancelled", attained=False)
    last = {"kind": "cancel", "reason": reason, "at": 1.0, "figures": {}}
    return replace(found, decisions=[*found.decisions, last])


def text_of(answer):
    return " ".join(answer.content.decode().split())


def listed(client, query=""):
    answer = client.get(reverse("workflows") + query)
    assert answer.status_code == 200
    return text_of(answer)


def one(client, name="w1", status=200):
    answer = client.get(reverse("workflow"), {"tenant": "acme", "workflow": name})
    assert answer.status_code == status
    return text_of(answer)


def cancel(client, name="w1", follow=True):
    return client.post(reverse("workflow-end"), {"tenant": "acme", "workflow": name}, follow=follow)


def test_an_open_one_without_requests_is_listed(viewer, acme):
    begin("unused")
    text = listed(viewer)
    assert ">unused</a>" in text
    assert '<span class="badge accent">open</span>' in text
    assert "in time so far" in text


def test_the_list_is_filtered_and_its_pages_keep_the_filter(viewer, acme):
    begin("open-one")
    begin("gone")
    live.run(cancel_workflow("acme", "gone", BY_TENANT))
    factories.records_stored(
        call("gone", 5, 1.0, left_s=60), *(call(f"free{number}", 10 + number, 1.0) for number in range(60))
    )
    assert ">open-one</a>" in listed(viewer, "?state=open")
    assert ">free1</a>" not in listed(viewer, "?state=open")
    cancelled = listed(viewer, "?state=cancelled")
    assert ">gone</a>" in cancelled
    assert "by its client" in cancelled
    free = listed(viewer, "?state=no_deadline&tenant=acme")
    assert "Page 1 of 2, 60 workflows" in free
    assert 'href="?tenant=acme&amp;state=no_deadline&amp;page=2"' in free
    assert "No workflows match these filters." in listed(viewer, "?tenant=nobody")
    assert "Check the filters" in listed(viewer, "?state=wrong")


def test_what_its_client_cancelled_is_not_counted(viewer, acme):
    begin("gone", 1.0)
    live.run(cancel_workflow("acme", "gone", BY_TENANT))
    factories.records_stored(call("gone", 5, 1.0, left_s=60, outcome="cancelled", attained=False))
    time.sleep(1.0)
    assert "workflows whose deadline has passed" not in listed(viewer)


def test_one_that_is_cancelled_after_its_deadline_keeps_its_result(viewer, acme):
    begin("w1", 0.05)
    factories.records_stored(call("w1", 5, 1.0, left_s=60))
    live.run(run_orders([CountRequests("acme", "w1", 1, 1, 0, 12, 4.0)]))
    time.sleep(0.1)
    live.run(cancel_workflow("acme", "w1", BY_TENANT))
    text = listed(viewer)
    assert "1 of 1 workflows whose deadline has passed" in text
    assert "by its client" not in text
    assert ">cancelled</span>" in text, "its state"


def test_one_shows_its_requests_in_order_with_their_shares_against_what_they_took(viewer, acme):
    begin("w1", stages=(("plan", 1.0), ("write", 3.0)))
    live.run(run_orders([CountRequests("acme", "w1", 3, 2, 0, 12, 0.1)]))
    factories.records_stored(
        call("w1", 30, 20.0, left_s=60, steps_left=4, id="req-a", stage="plan", output_tokens=5),
        call("w1", 9, 2.0, left_s=39, id="req-b", stage="write", output_tokens=7), call("other", 8, 1.0, id="req-c"),
    )  # fmt: skip
    text = one(viewer)
    rows = text.split('id="workflow-requests"')[1].split("</tbody>")[0].split("</tr>")
    assert "req-a" in rows[0]
    assert ">60.0 s<" in rows[0]
    assert ">15.0 s<" in rows[0]
    assert '<span class="miss">20.0 s</span>' in rows[0]
    assert "req-b" in rows[1]
    assert "<span>2.00 s</span>" in rows[1]
    assert "req-c" not in text
    assert "plan 25 %, write 75 %" in text
    assert "2, 0, 1" in text  # finished, not answered, running
    assert "12, 12 so far" in text


def cells(text, table):
    """Of each row of a table, its cells' text by their labels."""
    rows = text.split(f'id="{table}"')[1].split("</tbody>")[0].split("</tr>")[:-1]
    found = re.findall
    return [
        {label: re.sub("<[^>]+>", " ", cell).split() for label, cell in found(r'data-label="(.+?)">(.*?)</td>', row)}
        for row in rows
    ]


def test_stages_have_due_times_slack_and_predicted_lengths(viewer, acme, django_assert_max_num_queries):
    begin("w1", 60.0, stages=(("plan", 1.0), ("write", 3.0), ("check", 1.0)))
    factories.records_stored(
        call(
            "w1",
            30,
            20.0,
            left_s=60,
            steps_left=4,
            stage="plan",
            output_tokens=5,
            length_bounds=(2, 9),
            refined_bounds=[3, 4, 8],
        ),
        call("w1", 9, 2.0, left_s=39, steps_left=3, stage="write", output_tokens=7, length_bounds=(4, 8)),
        call("w1", 8, 1.0, left_s=38, steps_left=2, stage="write", output_tokens=3, length_bounds=(1, 5)),
    )
    with django_assert_max_num_queries(15):
        text = one(viewer)
    plan, write, check = cells(text, "workflow-stages")
    assert (plan["Slack"], plan["Predicted"]) == (["\u22125.00", "s"], ["2", "to", "9"])
    assert plan["Requests"] == ["1", "1", "over", "their", "share"]
    assert (write["Slack"], write["Requests"]) == (["18.0", "s"], ["2"])
    assert (write["Tokens out"], write["Predicted"], write["Goodput tokens"]) == (["10"], ["5", "to", "13"], ["10"])
    none = {label: ["–"] for label in ("Due", "Ended", "Slack", "Predicted")}
    assert check == none | {label: ["0"] for label in ("Requests", "Tokens out", "Goodput tokens")}
    first, second, _ = cells(text, "workflow-requests")
    assert first["Slack"] == ["\u22125.00", "s"]
    assert first["Tokens out"] == ["5", "predicted", "2", "to", "9", "after", "3", "tokens:", "4", "to", "8"]
    assert "5 tokens, predicted 2 to 9, after 3 tokens 4 to 8" in text
    assert second["Slack"] == ["11.0", "s"]


def test_stages_of_a_late_workflow_have_no_goodput_and_without_bounds_no_prediction(viewer, acme):
    factories.records_stored(
        call("w1", 30, 9.0, left_s=5, stage="plan", output_tokens=7, length_bounds=(1, 5)),
        call("w1", 20, 1.0, stage="plan", output_tokens=7), call("w1", 10, 1.0, output_tokens=7),
    )  # fmt: skip
    plan, other = cells(one(viewer), "workflow-stages")
    assert (plan["Goodput tokens"], plan["Predicted"], plan["Tokens out"]) == (["0"], ["–"], ["14"])
    assert (other["Slack"], other["Requests"]) == (["–"], ["1"])


def test_without_named_stages_there_is_no_table_of_them(viewer, acme):
    factories.records_stored(call("w1", 30, 9.0, left_s=5))
    assert "workflow-stages" not in one(viewer)


def test_a_late_one_has_no_goodput(viewer, acme):
    factories.records_stored(call("w1", 30, 9.0, left_s=5, output_tokens=7))
    text = one(viewer)
    assert "4.00 s late" in text
    assert "7, 0" in text


def test_one_that_nobody_knows_says_where_to_look(viewer, acme):
    text = one(viewer, "none", 404)
    assert "acme has no open workflow with this ID" in text
    assert viewer.get(reverse("workflow")).status_code == 404
    assert viewer.get(reverse("workflow"), {"tenant": "a\x00", "workflow": "w" * 500}).status_code == 404


def test_who_cancelled_it_is_known_from_its_records_alone(viewer, acme):
    factories.records_stored(ended_with("workflow_cancelled", "w1"), ended_with("workflow_cancelled_by_operator", "w2"))
    assert "by its client" in one(viewer)
    assert "by an operator" in one(viewer, "w2")
    assert "0 of 1 workflows whose deadline has passed" in listed(viewer)


def test_an_id_in_html_is_text(viewer, acme):
    begin("<script>x</script>")
    for text in (listed(viewer), one(viewer, "<script>x</script>"), one(viewer, "<script>y</script>", 404)):
        assert "<script>x</script>" not in text
        assert "<script>y</script>" not in text


def test_an_operator_cancels_it_and_the_page_shows_the_decision(operator, acme):
    begin("w1")
    assert "Cancel workflow" in one(operator)
    text = text_of(cancel(operator))
    assert "w1 cancelled. Its requests end within a second." in text
    decision = Decision.objects.get(kind="workflow_cancel")
    assert f'href="{reverse("decision", args=[decision.pk])}"' in text
    assert "cancelled workflow w1" in text.split("Decisions about this workflow")[1]
    assert "by an operator" in text
    assert '<button class="danger">Cancel workflow' not in text
    assert live.run(read_workflow("acme", "w1")).cancelled_by == "operator"
    assert "The workflow was already cancelled." in text_of(cancel(operator))
    assert Decision.objects.filter(kind="workflow_cancel").count() == 1


def test_what_cannot_be_cancelled_says_so(operator, acme):
    factories.records_stored(call("w1", 10, 1.0))
    assert "Cancel workflow" not in one(operator)
    assert "Gateways do not know this workflow" in text_of(cancel(operator))
    assert not Decision.objects.filter(kind="workflow_cancel").exists()


def test_a_viewer_reads_only(viewer, acme):
    begin("w1")
    assert "Cancel workflow" not in one(viewer)
    assert cancel(viewer, follow=False).status_code == 403
    assert not live.run(read_workflow("acme", "w1")).cancelled_by


@pytest.mark.usefixtures("no_redis")
def test_without_redis_records_are_shown_and_nothing_is_cancelled(operator, acme):
    factories.records_stored(call("w1", 10, 1.0, left_s=60))
    assert "Redis is unavailable. Only workflows with finished requests are shown" in listed(operator)
    text = one(operator)
    assert "It cannot be cancelled now." in text
    assert "Cancel workflow" not in text
    assert "Redis is unavailable. Check whether the workflow was cancelled" in text_of(cancel(operator))
    assert "error" in Decision.objects.get(kind="workflow_cancel").outcome


def test_decisions_of_another_tenants_workflow_are_not_shown(operator, acme):
    factories.tenant(name="other")
    live.run(run_orders([OpenWorkflow("other", "w1", 60.0)]))
    begin("w1")
    operator.post(reverse("workflow-end"), {"tenant": "other", "workflow": "w1"})
    assert Decision.objects.filter(kind="workflow_cancel").count() == 1
    assert "No decisions about the workflow itself." in one(operator)
    assert datetime.now(UTC).timestamp() < live.run(read_workflow("acme", "w1")).due_at


def test_its_requests_are_drawn_over_time(viewer, acme):
    kept = {"kind": "step", "reason": "stored_step", "at": 0.0, "figures": {}}
    again = call("w", 20, 1.0, left_s=30, stage="<write>")
    factories.records_stored(
        call("w", 30, 5.0, left_s=40, steps_left=10, stage="plan"),
        replace(again, decisions=[*again.decisions, kept]),
        *(call("w", 10 - 0.1 * number, 0.05, left_s=20) for number in range(60)),
    )
    page = viewer.get("/workflows/one/", {"tenant": "acme", "workflow": "w"}).content.decode()
    drawn = page.partition('<div class="workflow-chart"')[2].partition("</svg>")[0]
    assert drawn.count("<rect class=") - drawn.count('class="share"') == 62
    assert drawn.count('class="bad"') == 1  # took longer than its share
    assert re.search('aria-label="1 plan: [^"]*, took 5 s, share 4 s"', drawn)
    assert "stored answer" in drawn
    assert "&lt;write&gt;" in drawn
    assert "<write>" not in drawn
    assert 'href="/requests/' in drawn
    assert page.count("stored answer") == 3  # read out, on hover, in the table


def test_what_shares_a_call_or_is_a_branch_is_marked_in_the_graph_with_predicted_lengths(viewer, acme):
    def told(reason, **figures):
        return [{"kind": "share", "reason": reason, "at": 0.0, "figures": figures}]

    pays = call("w", 30, 5.0, id="pays", output_tokens=30, length_bounds=(10, 40))
    same = call("w", 29, 4.0, id="same")
    branch = call("w", 20, 1.0, id="branch")
    factories.records_stored(
        replace(pays, decisions=told("call_shared", sharing=1)),
        replace(same, decisions=told("shared_call", of_request="pays")),
        replace(branch, decisions=told("from_checkpoint")),
    )
    page = text_of(viewer.get(reverse("workflow"), {"tenant": "acme", "workflow": "w"}))
    drawn = page.partition('<div class="workflow-chart"')[2].partition("</svg>")[0]
    assert re.findall(r'<text class="mark"[^>]*>(\w+)<', drawn) == ["shared", "shared", "branch"]
    assert drawn.count('class="follows shared"') == 1
    assert "Dotted lines" in page
    assert "30 tokens, predicted 10 to 40" in drawn


def hung_up(workflow, ago_s, **fields):
    return call(workflow, ago_s, 1.0, left_s=40, outcome="cancelled", error_code="client_closed", **fields)


def test_a_step_that_its_client_gave_up_and_asked_for_again_leaves_the_workflow_in_time(viewer, acme):
    plan = call(
        "w", 32, 1.0, left_s=50, id="plan", step_key="plan", stage="plan", output_tokens=5, length_bounds=(2, 9)
    )
    again = call("w", 15, 0.0, left_s=33, attempts=0, step_key="plan", stage="plan", output_tokens=5)
    kept = {"kind": "step", "reason": "stored_step", "at": 0.0, "figures": {"of_request": "plan"}}
    factories.records_stored(
        plan,
        hung_up("w", 30, step_key="write", stage="write"),
        replace(again, decisions=[*again.decisions, kept]),
        call("w", 14, 2.0, left_s=32, step_key="write", stage="write", output_tokens=9),
    )
    text = one(viewer, "w")
    assert "<dd>4, 0, 0</dd>" in text  # finished, not answered, running
    assert "<dd>1, 0, 0, 1</dd>" in text  # kept, shared, branches, given up
    assert "<dd>14, 14 so far</dd>" in text  # tokens, those of the kept answer once
    assert text.count('class="given-up"') == 1
    assert 'class="bad"' not in text
    assert "not counted: its client hung up, and can ask for this step again" in text
    assert "stored answer (request 1): no new tokens" in text
    first, write = cells(text, "workflow-stages")
    assert (first["Tokens out"], first["Predicted"]) == (["5"], ["2", "to", "9"])
    assert write["Requests"] == ["2", "1", "given", "up"]


def test_without_a_step_key_a_hang_up_is_a_request_that_was_not_answered(viewer, acme):
    factories.records_stored(hung_up("w", 30), call("w", 14, 2.0, left_s=32))
    text = one(viewer, "w")
    assert "1 not answered" in text
    assert 'class="bad"' in text


def test_the_page_of_an_open_workflow_asks_again_for_what_changes(viewer, acme):
    begin("a/w")
    page = viewer.get(reverse("workflow"), {"tenant": "acme", "workflow": "a/w"}).content.decode()
    at = re.search('data-polled="([^"]+)"', page)[1].replace("&amp;", "&")
    assert "No finished requests yet" in viewer.get(at).json()["html"]
    factories.records_stored(call("a/w", 5, 1.0, left_s=60, id="req-a"))
    told = viewer.get(at).json()
    assert "req-a" in told["html"]
    assert 'data-part="workflow"' in told["html"]
    assert told["age_s"] < told["stale_after_s"]
    assert viewer.get(reverse("workflow-live"), {"tenant": "acme", "workflow": "none"}).status_code == 404


def test_a_workflow_that_is_over_is_not_asked_for_again(viewer, acme):
    factories.records_stored(call("w", 30, 1.0, left_s=5))
    assert "data-polled" not in one(viewer, "w")


def test_parents_that_the_client_named_are_drawn_and_told_from_inferred_ones(viewer, acme):
    factories.records_stored(
        call("w", 30, 1.0, id="p", stage="plan", step_key="plan"),
        call("w", 20, 1.0, id="a", stage="a", parents=["plan"]),
        call("w", 10, 1.0, id="b", stage="b", parents=["p", "a"]),
    )
    page = one(viewer, "w")
    assert page.count('class="follows"') == 3
    assert "inferred" not in page
    factories.records_stored(call("w", 5, 1.0, id="c", stage="c"))
    page = one(viewer, "w")
    assert page.count('class="follows inferred"') == 1
    assert "Dashed lines are inferred from times" in page
    assert "its client said it depends on" in page


def test_tool_steps_are_drawn_with_their_parents_and_have_no_page(viewer, acme):
    began = time.time() - 18
    tool = {"key": "t1", "name": "<search>", "began": began, "ended": began + 3, "parents": ["p"]}
    factories.records_stored(
        call("w", 20, 1.0, id="p", stage="plan"),
        call("w", 10, 1.0, id="w", stage="write", parents=["t1"], tool_steps=[tool]),
    )
    page = one(viewer, "w")
    drawn = page.partition('<div class="workflow-chart"')[2].partition("</svg>")[0]
    assert drawn.count('class="tool"') == 1
    assert 'aria-label="2 &lt;search&gt;: tool step, took 3 s"' in drawn
    assert drawn.count('class="follows"') == 2
    assert drawn.count('href="/requests/') == 2


@pytest.mark.parametrize(("requests", "told"), [(MOST_DRAWN, False), (MOST_DRAWN + 1, True)])
def test_the_page_says_when_not_all_requests_are_drawn(viewer, acme, requests, told):
    factories.records_stored(*(call("w", 200 - number, 0.5, left_s=300) for number in range(requests)))
    page = viewer.get("/workflows/one/", {"tenant": "acme", "workflow": "w"}).content.decode()
    chart = page.partition('id="timeline-title"')[2].partition("</svg>")[0]
    assert chart.count("<rect class=") - chart.count('class="share"') == MOST_DRAWN
    assert ("Only the first 100 requests are drawn." in chart) is told
