"""Flow settings before they are put in force: recorded requests in the ordering and with the drop budget that are in
force, and with the new ones."""

from __future__ import annotations

import re
import time

import pytest
from django.urls import reverse
from django.utils import timezone

from console.views.configuration.previews import compared
from controller.models import Decision, Experiment, FlowSettings, KvTransfer
from controller.services.slo.flow_settings import flow_settings_create
from tests import experiment_data as data
from tests import factories
from tests.console.live.live_data import fleet
from tests.factories import ACTOR
from workers.experiments import runner as worker

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unsent_experiments", "live_store")]

FIRST_COME = "first_come_first_served"


def typed(ordering="", options="", **changes):
    return {"flow_policy": "off", "drop_budget": "0", "ordering": ordering, "ordering_options": options, **changes}


def previewed(client, **form):
    return client.post(reverse("flow-settings-preview"), typed(**form)).json()


def crowd():
    """Three requests that have a minute for each that has a second, more than the one instance keeps up with."""
    data.fleet(1)
    data.traffic(
        400, every_s=0.125, output_tokens=60, prompt_tokens=600, attained=lambda n: n % 2 == 0,
        target_ttft_s=lambda n: 60.0 if n % 4 else 1.0, waiting_time_s=lambda n: 120.0 if n % 4 else 5.0,
        target_tpot_s=1.0, slo_class=lambda n: "batch" if n % 4 else "interactive",
    )  # fmt: skip


def test_both_orderings_are_simulated_on_the_same_recorded_requests(operator):
    crowd()
    flow_settings_create(actor=ACTOR, flow_policy="off", ordering=FIRST_COME)
    said = previewed(operator, ordering="earliest_deadline_first", version="1", simulate="1")
    assert set(said) == {"errors", "summary", "slug"}, said
    worker.next_experiment()
    preview = Experiment.objects.get(slug=said["slug"])
    assert (preview.state, preview.error) == ("done", "")
    rows = {each["name"]: each for each in compared(preview.result)}
    assert set(rows) == {"all traffic", "batch", "interactive"}
    urgent = rows["interactive"]
    assert (urgent["requests"], rows["all traffic"]["requests"]) == (100, 400)
    assert urgent["before"] < 0.5, "behind all that has a minute"
    assert urgent["after"] > 0.7, "before it"
    assert urgent["recorded"] == 1.0
    page = " ".join(operator.get(f"/previews/{preview.slug}/").content.decode().split())
    assert f"<dt>Before</dt><dd><code>{FIRST_COME}</code>" in page
    assert "<dt>After</dt><dd><code>earliest_deadline_first</code>" in page
    assert "All <strong>400</strong> requests for demo in the last hour" in page
    assert "without learned bounds" in page
    assert FlowSettings.objects.get().ordering == FIRST_COME, "nothing is saved"
    assert not Decision.objects.filter(kind="flow_settings_updated").exists()


def gateways(live_store, count):
    live_store.fleets = [fleet(gateway=f"gateway-{number}", at=time.time()) for number in range(count)]


def mixed_lengths():
    """More long and short prompts than the one instance keeps up with: without the long ones, others are in time."""
    data.fleet(1)
    data.traffic(
        160, every_s=0.15, output_tokens=4, prompt_tokens=lambda n: 2400 if n % 5 == 0 else 300,
        target_ttft_s=2.0, waiting_time_s=20.0, target_tpot_s=1.0, attained=True,
    )  # fmt: skip


def simulated(client, **form):
    """The page part of a finished preview, and its row."""
    said = previewed(client, simulate="1", **form)
    assert set(said) == {"errors", "summary", "slug"}, said
    worker.next_experiment()
    preview = Experiment.objects.get(slug=said["slug"])
    assert (preview.state, preview.error) == ("done", "")
    return " ".join(client.get(f"/previews/{preview.slug}/").content.decode().split()), preview


def test_a_drop_budget_is_simulated_on_the_queues_of_several_gateways(operator, live_store):
    mixed_lengths()
    gateways(live_store, 2)
    page, preview = simulated(operator, drop_budget="50")
    assert preview.spec["settings"] == {"gateways": 2}
    assert [each.get("pruning") for each in preview.spec["policies"]] == [None, {"drop_budget": 0.5}]
    before, after = (entry["first_seed"]["pruned"] for entry in preview.result["entries"])
    assert before == {"requests": 0, "attained": 0}
    assert after["requests"] > 10
    assert "<dt>Drop budget before</dt> <dd>0 %: no request pruned</dd>" in page
    counts = f"{after['requests']} requests pruned, {after['attained']} of them in time"
    assert f"<dt>Drop budget after</dt> <dd>50 %: {counts}</dd>" in page
    assert "2 gateways take the requests in turn." in page
    assert "<dt>Before</dt>" not in page, "the ordering stays"
    assert not FlowSettings.objects.exists(), "nothing is saved"


def test_an_ordering_is_simulated_with_the_drop_budget_in_force(operator, live_store):
    data.fleet()
    data.traffic(5)
    flow_settings_create(actor=ACTOR, flow_policy="off", drop_budget=0.25)
    gateways(live_store, 3)
    page, preview = simulated(operator, ordering="calm", drop_budget="25", version="1")
    assert preview.spec["settings"] == {"gateways": 3}
    assert [each["pruning"] for each in preview.spec["policies"]] == [{"drop_budget": 0.25}] * 2
    assert page.count("25 %: no request pruned") == 2


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (0, "no gateway is reporting, so it is unknown at how many gateways requests wait"),
        (
            1,
            "one gateway is running and no transfer daemon orders KV transfers of this model; requests are pruned "
            "where they wait at several gateways, or for a link with ordered transfers",
        ),
    ],
)
def test_where_nothing_can_be_pruned_the_preview_says_why(operator, live_store, count, why):
    data.fleet()
    data.traffic(5)
    gateways(live_store, count)
    assert previewed(operator, drop_budget="20", simulate="1")["refused"] == f"The simulation cannot run: {why}."
    page, preview = simulated(operator, ordering="calm", drop_budget="20")
    assert "settings" not in preview.spec
    assert f"Pruning is not simulated: {why}." in page
    assert "<dt>Drop budget" not in page
    live_store.away = True
    assert "no gateway is reporting" in previewed(operator, drop_budget="20", simulate="1")["refused"]


def test_with_one_gateway_a_link_can_be_pruned_for_where_daemons_order_its_transfers(operator, live_store):
    data.fleet()
    (request, *_) = data.traffic(5)
    gateways(live_store, 1)
    flow_settings_create(actor=ACTOR, flow_policy="mfs")
    KvTransfer.objects.create(
        started_at=timezone.now(), request=request, attempt=1, model="demo", source="p", target="d", outcome="done",
        state="released", bytes=400_000, seconds=0.002, tokens=100, layers=28, measured_by="engine", flow="scheduled",
    )  # fmt: skip
    _, preview = simulated(operator, flow_policy="mfs", drop_budget="20", version="1")
    assert preview.spec["policies"][1]["pruning"] == {"drop_budget": 0.2}


def test_a_silent_gateway_does_not_count(operator, live_store):
    data.fleet()
    data.traffic(5)
    live_store.fleets = [fleet(at=time.time()), fleet(gateway="gateway-2", at=time.time() - 600)]
    assert "one gateway is running" in previewed(operator, drop_budget="20", simulate="1")["refused"]


def test_an_edit_of_a_class_is_simulated_in_the_ordering_in_force(operator):
    data.fleet()
    row = factories.slo_class(name="interactive")
    data.traffic(5)
    flow_settings_create(actor=ACTOR, flow_policy="off", ordering="calm", ordering_options={"frame_steps": 9})
    names = ("title", "ttft_s", "tpot_s", "waiting_time_s", "value", "version")
    form = {**{name: getattr(row, name) for name in names}, "target": row.target * 100, "deadline_s": ""}
    slug = operator.post(f"/classes/{row.pk}/preview/", {**form, "simulate": "1"}).json()["slug"]
    used = [each["overrides"]["ordering"] for each in Experiment.objects.get(slug=slug).spec["policies"]]
    assert used == [{"name": "calm", "frame_steps": 9}] * 2
    page = operator.get(f"/previews/{slug}/").content.decode()
    assert "<dt>Before</dt>" not in page, "the ordering stays"


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        ({"ordering": "by_colour"}, "ordering", "Select a valid choice"),
        ({"ordering": "calm", "options": "{"}, "ordering_options", "valid JSON"),
        ({"ordering": "calm", "options": '{"window": 1}'}, "ordering_options", "no setting"),
        ({"options": '{"frame_steps": 9}'}, "ordering_options", "Options need an ordering"),
        ({"drop_budget": "120"}, "drop_budget", "less than or equal to 100"),
        ({"flow_policy": "karuna"}, "flow_policy", "Select a valid choice"),
    ],
)
@pytest.mark.parametrize("simulate", [{}, {"simulate": "1"}], ids=["typed", "simulated"])
def test_what_is_wrong_stands_at_its_field(operator, form, field, said, simulate):
    told = previewed(operator, **form, **simulate)
    assert set(told) == {"errors"}
    assert set(told["errors"]) == {field}
    assert said in told["errors"][field][0]
    assert not Experiment.objects.exists()


def test_while_one_types_nothing_is_simulated(operator):
    assert previewed(operator, ordering="calm") == {"errors": {}, "summary": ""}
    assert not Experiment.objects.exists()


def test_nothing_to_simulate_says_why(operator):
    ask = {"ordering": "calm", "simulate": "1"}
    assert previewed(operator, **ask)["refused"] == "The simulation cannot run: no model exists yet."
    data.fleet()
    told = previewed(operator, **ask)["refused"]
    assert told == "The simulation cannot run: no request for demo is recorded in the last hour."
    data.traffic(5)
    told = previewed(operator, **ask, model="x" * 500)["refused"]
    assert told == f"The simulation cannot run: no request for {'x' * 80} is recorded in the last hour."
    assert "slug" in previewed(operator, **ask, model="demo")


@pytest.mark.parametrize("form", [{}, {"ordering": "feasible_deadlines"}], ids=["as started", "the same by name"])
def test_settings_in_force_are_not_compared_to_themselves(operator, form):
    data.fleet()
    data.traffic(5)
    told = previewed(operator, **form, simulate="1")["refused"]
    assert told == "The simulation cannot run: these are the ordering and the drop budget in force; change one."
    flow_settings_create(actor=ACTOR, flow_policy="off", ordering="calm")
    assert "slug" in previewed(operator, **form, version="1", simulate="1"), "back to what gateways were started with"


def test_the_model_can_be_chosen_where_several_have_traffic(operator):
    page = operator.get(reverse("flow-settings")).content.decode()
    assert f'data-preview-at="{reverse("flow-settings-preview")}"' in page
    assert 'id="preview-model"' not in page
    data.fleet()
    data.fleet(model="small")
    data.traffic(9)
    assert 'id="preview-model"' not in operator.get(reverse("flow-settings")).content.decode()
    data.traffic(3, model="small")
    page = operator.get(reverse("flow-settings")).content.decode()
    assert re.findall(r'<option value="(demo|small)">', page) == ["demo", "small"], "the busiest first"
    for asked, found in (({}, "demo"), ({"model": "small"}, "small")):
        slug = previewed(operator, ordering="calm", simulate="1", **asked)["slug"]
        assert Experiment.objects.get(slug=slug).spec["workload"]["model"] == found


def test_a_viewer_has_no_preview(viewer):
    assert viewer.post(reverse("flow-settings-preview"), typed("calm")).status_code == 403
    assert viewer.get(reverse("flow-settings-preview")).status_code in (403, 405)


def test_the_page_names_all_settings_of_both_orderings(operator):
    data.fleet()
    data.traffic(5)
    slug = previewed(operator, ordering="calm", options='{"frame_steps": 9}', simulate="1")["slug"]
    worker.next_experiment()
    page = operator.get(f"/previews/{slug}/")
    (before, kept), (after, options) = page.context["orderings"]
    assert (before, after) == ("feasible_deadlines", "calm")
    assert ("margin_s", "0.05") in kept
    assert {("frame_steps", "9"), ("copies", "8")} <= set(options)
    assert "<code>frame_steps</code> 9, <code>cutoff</code> 0.95" in page.content.decode()
