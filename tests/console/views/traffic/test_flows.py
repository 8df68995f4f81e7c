"""The page Flows and the form of the flow settings."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.urls import reverse
from django.utils import timezone

from console.views.traffic.flows import PAGE_ROWS
from controller.core.types import RequestRecord
from controller.models import Action, Decision, FlowSettings, KvTransfer, Transfer
from controller.services.slo.flow_settings import flow_settings_create
from controller.wording.values import ORDERING_WORDS
from tests import factories
from tests.factories import ACTOR

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def flow(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"f{number}", "request": f"req-{number}", "stage": 3, "port": "out", "to": "10.0.0.2",
        "size_bytes": 2e6, "left_bytes": 1e6, "due_in_s": 0.25, "go": False, "waiting": False, "rate": 0.0,
        "age_s": 0.5, "held_s": 0.125, "levels": [(0.0, 8), (0.04, 5), (0.4, 1)], "end": "", "ended_s": 0.0,
        **fields,
    }  # fmt: skip


def host(**fields: Any) -> dict[str, Any]:
    levels = [{"level": 1, "flows": 2, "held": 1, "left_bytes": 3e6}]
    port = {"port": "out", "flows": 2, "held": 1, "rate": 25e6, "levels": levels}
    return {
        "host": "node-1", "at": time.time(), "policy": "mfs", "bandwidth": 100e6, "ports": [port], "open": 2,
        "ending": 0, "flows": [flow()], **fields,
    }  # fmt: skip


@pytest.fixture
def on(live_store):
    flow_settings_create(actor=ACTOR, flow_policy="mfs")
    live_store.host_flows = [host()]
    return live_store


def shown(client, path="/flows/"):
    answer = client.get(path)
    assert answer.status_code == 200, answer.content
    return " ".join(answer.content.decode().split())


def test_it_shows_the_load_of_links_and_the_levels_of_a_transfer(viewer, on):
    text = shown(viewer)
    assert "MFS: promoted near the deadline." in text
    assert "25 MB/s, 25 %" in text
    assert "Level 1: 2 flows, 1 held, 3 MB left" in text
    assert '<a class="mono" href="/requests/req-1/">req-1</a>' in text
    assert "KV transfer, node-1 to 10.0.0.2" in text
    assert "> 8, 5 after 40 ms, 1 after 400 ms" in text
    assert "in 250 ms" in text
    assert "silent" not in text
    assert "Edit flow settings" not in text, "a viewer reads"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"due_in_s": -0.5}, "500 ms late"),
        ({"due_in_s": None}, "none"),
        ({"end": "ended", "due_in_s": 0.25}, "250 ms early"),
        ({"end": "lost"}, "its engine disconnected"),
        ({"go": True}, "sending"),
        ({"waiting": True, "go": True}, "waiting for data"),
        ({"request": "", "stage": 4, "port": "memory"}, "Weight load"),
        ({"levels": []}, "none yet"),
    ],
)
def test_states_of_a_transfer(viewer, on, fields, said):
    on.host_flows = [host(flows=[flow(**fields)])]
    assert said in shown(viewer)


def test_a_silent_daemon_is_marked_and_another_is_not(viewer, on):
    on.host_flows = [host(host="gone", at=time.time() - 60), host()]
    text = shown(viewer)
    assert text.count("has not reported since") == 1
    part = viewer.get("/flows/live/1/").json()
    assert part["reason"] == ""
    assert part["age_s"] < 5
    on.host_flows = [host(at=time.time() - 60)]
    assert viewer.get("/flows/live/1/").json()["reason"] == "No transfer daemon is reporting"


def test_what_a_silent_daemon_scheduled_is_not_shown_as_going_on(viewer, on):
    """The report may be an hour old. What had ended by then has ended."""
    sent = flow(2, end="ended", ended_s=3.0)
    on.host_flows = [host(host="gone", at=time.time() - 60, flows=[flow(1, go=True), sent]), host(flows=[flow(3)])]
    rows = shown(viewer).split('<tr data-key="gone/f1">')
    assert len(rows) == 2
    row = rows[1].split("</tr>")[0]
    assert ">unknown</span>" in row
    assert "sending at the last report" in row
    assert "in 250 ms" not in row
    assert 'data-key="node-1/f3"' in rows[0], "what goes on comes first"
    assert "sent</span>" in rows[1]


def test_without_redis_nothing_is_known(viewer, on):
    on.away = True
    text = shown(viewer)
    assert "Redis is unavailable, so no report" in text
    assert "No transfers" not in text
    part = viewer.get("/flows/live/1/").json()
    assert (part["age_s"], part["reason"]) == (None, "Redis is unavailable")


def test_while_it_is_off_the_page_says_how_to_switch_it_on(viewer, operator, live_store):
    for client in (viewer, operator):
        text = shown(client)
        assert "No flow policy is set" in text
        assert "python -m workers.flowd" in text
    assert 'href="/flows/settings/"' in shown(operator)
    flow_settings_create(actor=ACTOR, flow_policy="off")
    assert "The flow policy is off" in shown(viewer)


def test_a_daemon_that_has_not_taken_over_the_policy_says_so(viewer, on):
    on.host_flows = [host(policy="shortest_first", ending=2)]
    text = shown(viewer)
    assert "This daemon does not follow the stored flow policy yet" in text
    assert "2 flows still follow the previous policy" in text


def test_orders_that_a_daemon_did_not_take_are_counted(viewer, on):
    assert "that changed nothing" not in shown(viewer)
    on.host_flows = [host(orders={"taken": 7, "late": 2, "out_of_sequence": 1})]
    assert "changed nothing since this daemon started: 2 too late, 1 out of sequence." in shown(viewer)


def test_a_link_that_is_faster_than_the_daemon_was_told_is_marked(viewer, on):
    assert "FLOW_LINK_GBPS" not in shown(viewer)
    on.host_flows = [host(bandwidth=20e6)]
    assert "than the 20 MB/s of FLOW_LINK_GBPS" in shown(viewer)


def test_many_transfers_have_pages(viewer, on):
    on.host_flows = [host(flows=[flow(number) for number in range(2 * PAGE_ROWS + 1)])]
    pages = [shown(viewer, f"/flows/?page={number}") for number in (1, 2, 3)]
    assert [page.count('href="/requests/req-') for page in pages] == [PAGE_ROWS, PAGE_ROWS, 1]
    assert "Page 2 of 3, 101 transfers" in pages[1]
    assert "?page=3" in pages[1]
    for odd in ("0", "-1", "x", "99999999999999999999"):
        assert "Page " in shown(viewer, f"/flows/?page={odd}")
    assert "req-100" in viewer.get("/flows/live/3/").json()["html"]


def test_those_that_go_on_come_first_then_the_newest_that_ended(viewer, on):
    ended = [flow(2, end="ended", ended_s=9.0), flow(3, end="ended", ended_s=1.0)]
    on.host_flows = [host(flows=[*ended, flow(1)])]
    text = shown(viewer)
    assert text.index("req-1<") < text.index("req-3<") < text.index("req-2<")


def test_the_first_save_stores_the_policy_and_the_next_one_changes_it(operator, live_store, announced):
    assert operator.post(reverse("flow-settings"), {"flow_policy": "mfs", "drop_budget": "0"}).url == "/flows/"
    assert FlowSettings.objects.get().flow_policy == "mfs"
    answer = operator.post(reverse("flow-settings"), {"flow_policy": "off", "drop_budget": "0", "version": 1})
    assert answer.url == "/flows/"
    row = FlowSettings.objects.get()
    assert (row.flow_policy, row.version) == ("off", 2)
    assert announced == [1, 1]
    text = shown(operator, "/flows/settings/history/")
    assert text.count("by ") >= 2
    decision = Decision.objects.get(kind="flow_settings_updated")
    assert f"/flows/settings/?restore={decision.pk}" in text
    restored = shown(operator, f"/flows/settings/?restore={decision.pk}")
    assert '<option value="mfs" selected>' in restored
    assert "before that change" in restored


def recorded(number: int, size: float, ago_s: float, ttft_s: float) -> RequestRecord:
    """A request with a transfer of so many bytes, which began `ago_s` before now, as soon as the request arrived."""
    at = timezone.now() - timedelta(seconds=ago_s)
    KvTransfer.objects.create(
        started_at=at, request=f"req-{number}", attempt=1, model="llama", source="p1", target="d1", outcome="done",
        state="committed", reason="", bytes=size, layers=32, tokens=100, cached=0, seconds=1.0, measured_by="engine",
    )  # fmt: skip
    return factories.record(id=f"req-{number}", arrived_at=at.timestamp(), target_ttft_s=ttft_s)


def test_the_form_shows_the_last_hour_under_each_policy(operator, on):
    """On a link of 100 MB/s: an urgent transfer behind a large one is late unless deadlines count."""
    first, second = recorded(1, 1e9, 100.0, 60.0), recorded(2, 2e8, 99.0, 3.0)
    factories.records_stored(first, second)
    recorded(3, 1e9, 4_000.0, 1.0)
    text = shown(operator, reverse("flow-settings"))
    assert "2 KV transfers, simulated over links of 100 MB/s" in text
    rows = re.findall(r'<th scope="row">([^<]+)</th> <td class="num" data-label="In time">(\d)</td>', text)
    assert dict(rows) == {
        "MFS: promoted near the deadline": "2", "Fair sharing": "1", "Shortest first": "2",
        "Earliest deadline first": "2",
    }  # fmt: skip


def moved(number: int, flow: str, ago_s: float = 60.0) -> RequestRecord:
    """A request whose transfer has this scheduling in its record."""
    began = recorded(number, 1e6, ago_s, 1.0)
    step = {"kind": "transfer", "reason": "", "at": 0.1, "figures": {"flow": flow, "held_s": 0.0}}
    return replace(began, decisions=[step])


def test_it_says_how_many_transfers_went_unscheduled_and_why(viewer, on):
    factories.records_stored(
        moved(1, "lost"), moved(2, "lost", 30.0), moved(3, "unavailable"), moved(4, "scheduled"), moved(5, "off"),
        moved(6, "silent", 700.0), recorded(7, 1e6, 60.0, 1.0),
    )  # fmt: skip
    text = shown(viewer)
    assert (
        "In the last 10 minutes 3 KV transfers went unscheduled: the connection to the transfer daemon was lost, 2"
        in text
    )
    assert '(newest: <a class="mono" href="/requests/req-2/">req-2</a>); no transfer daemon was running, 1' in text
    assert "stopped responding" not in text


def test_it_says_how_many_weight_loads_went_unscheduled_and_why(viewer, on):
    action = Action.objects.create(
        kind="weights_load", instance=factories.instance(), actor_type="job", actor="a", created_at=timezone.now(),
    )  # fmt: skip
    for number, (flow, ago_s) in enumerate(
        [("lost", 60.0), ("lost", 30.0), ("scheduled", 30.0), ("", 30.0), ("silent", 700.0)], start=1
    ):
        Transfer.objects.create(
            action=action, source_kind="engine", source="e0", target=f"e{number}", attempt=number, bytes=1, seconds=1.0,
            flow=flow, state=Transfer.State.DONE, recorded_at=timezone.now() - timedelta(seconds=ago_s),
        )  # fmt: skip
    text = shown(viewer)
    assert (
        "In the last 10 minutes 2 weight loads went unscheduled: the connection to the transfer daemon was lost, 2 "
        '(newest: of <span class="mono">e2</span>).'
    ) in text
    assert "stopped responding" not in text


def test_without_any_it_says_nothing_of_unscheduled_transfers(viewer, on):
    factories.records_stored(moved(1, "scheduled"))
    assert "unscheduled" not in shown(viewer)


def test_while_the_policy_is_off_nothing_has_to_be_scheduled(viewer, live_store):
    flow_settings_create(actor=ACTOR, flow_policy="off")
    factories.records_stored(moved(1, "lost"))
    assert "unscheduled" not in shown(viewer)


def test_without_transfers_the_form_says_so(operator, live_store):
    assert "No KV transfers in the last hour" in shown(operator, reverse("flow-settings"))


def test_two_people_who_save_see_both_values(operator, live_store, announced):
    flow_settings_create(actor=ACTOR, flow_policy="mfs")
    FlowSettings.objects.update(version=2, flow_policy="earliest_deadline")
    answer = operator.post(reverse("flow-settings"), {"flow_policy": "off", "drop_budget": "0", "version": 1})
    assert answer.status_code == 412
    assert "was changed by someone else" in answer.content.decode()
    assert FlowSettings.objects.get().flow_policy == "earliest_deadline"


def test_an_unknown_policy_is_refused_at_its_field(operator, live_store):
    answer = operator.post(reverse("flow-settings"), {"flow_policy": "karuna", "drop_budget": "0"})
    assert answer.status_code == 422
    assert "Select a valid choice" in answer.content.decode()
    assert not FlowSettings.objects.exists()


def test_a_viewer_cannot_change_it(viewer, live_store):
    assert viewer.get(reverse("flow-settings")).status_code == 403
    assert viewer.post(reverse("flow-settings"), {"flow_policy": "mfs"}).status_code == 403


def test_the_form_says_what_each_ordering_considers_first(operator):
    html = operator.get(reverse("flow-settings")).content.decode()
    assert html.count('data-label="Considered first"') == len(ORDERING_WORDS)
    assert ORDERING_WORDS["calm"] in html


def test_an_ordering_is_chosen_with_its_options_and_undone(operator):
    url = reverse("flow-settings")
    text = shown(operator, url)
    assert "frame_steps" in text
    assert "apparent_tardiness_cost" in text
    change = {"flow_policy": "off", "drop_budget": "0", "ordering": "calm", "ordering_options": '{"frame_steps": 100}'}
    assert operator.post(url, change).url == "/flows/"
    row = FlowSettings.objects.get()
    assert (row.ordering, row.ordering_options) == ("calm", {"frame_steps": 100})
    assert "in the order of <code>calm</code> with <code>{&quot;frame_steps&quot;: 100}</code>" in shown(operator)
    wrongs = [
        ('{"window": 1}', "no setting"), ("{", "valid JSON"), ("[]", "JSON object"), ("[" * 1_999, "valid JSON"),
        ("[" * 100_000, "at most 2000"), ('{"frame_steps": ' + "1" * 5_000 + "}", "at most 2000"),
        ('{"frame_steps": ' + "1" * 1_900 + "}", "at most"), (r'{"\ud800": 1}', "valid JSON"),
    ]  # fmt: skip
    for wrong, told in wrongs:
        answer = operator.post(url, {**change, "version": 1, "ordering_options": wrong})
        assert answer.status_code == 422
        assert set(answer.context["form"].errors) == {"ordering_options"}
        assert told in str(answer.context["form"].errors)
    assert operator.post(url, {"flow_policy": "off", "drop_budget": "0", "version": 1}).url == "/flows/"
    assert FlowSettings.objects.get().ordering == ""
    decision = Decision.objects.get(kind="flow_settings_updated")
    restored = operator.get(f"{url}?restore={decision.pk}").context["form"]
    assert restored.initial["ordering"] == "calm"
    assert "frame_steps" in shown(operator, "/flows/settings/history/")
