"""Fleet: the topology, one instance with its measurements, and its actions."""

from __future__ import annotations

import re
import time

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from console.management import demo
from controller.models import Decision, Device, InstanceDevice, LatencyProfile, Link, ProvisionerLook
from controller.services.records.requests import records_write
from tests import factories
from tests.console.live.live_data import fleet, instance
from workers.engine.profiles import load_profile


def test_hosts_devices_links_and_instances_are_in_one_diagram(viewer, live_store):
    near, far = factories.host(name="rack-1"), factories.host(name="rack-2")
    Link.objects.create(source=near, target=far, medium="rdma", bandwidth_bytes_s=12.5e9)
    devices = [Device.objects.create(host=near, index=n, kind="gpu", memory_bytes=8 * 2**30) for n in range(2)]
    row = factories.instance(id="engine-here", host=near)
    InstanceDevice.objects.create(instance=row, device=devices[0])
    factories.instance(id="engine-nowhere", model=row.model, role="decode")
    live_store.fleets = [fleet(at=time.time(), instances=[instance(id="engine-here", utilisation=0.97)])]
    answer = viewer.get(reverse("fleet"))
    places = {each["place"].host.name if each["place"].host else None: each for each in answer.context["places"]}
    assert [cell["row"].pk for cell in places["rack-1"]["instances"]] == ["engine-here"]
    assert places["rack-1"]["place"].free == 1
    assert places["rack-1"]["instances"][0]["status"] == "bad"
    assert [cell["row"].pk for cell in places[None]["instances"]] == ["engine-nowhere"]
    html = answer.content.decode()
    assert "12.5 GB/s" in html
    assert {each["letter"] for each in answer.context["roles"]} == {"P+D", "D"}


def test_two_hundred_instances_cost_as_many_queries_as_two(viewer, live_store, django_assert_max_num_queries):
    model = factories.served_model()
    hosts = [factories.host() for _ in range(25)]
    for number in range(200):
        factories.instance(model=model, host=hosts[number % 25])
    with django_assert_max_num_queries(11):
        answer = viewer.get(reverse("fleet"))
    assert answer.content.decode().count('class="cell ') == 200


def test_an_instance_shows_what_it_took_beside_its_fit(viewer, live_store):
    row = factories.instance(device_kind="gpu", max_num_seqs=8)
    LatencyProfile.objects.create(
        model=row.model, device_kind="gpu", samples=40,
        coefficients=dict.fromkeys(("prefill_c", "decode_b"), 0.0)
        | {"prefill_a": 0.01, "prefill_b": 0.001, "decode_a": 0.02, "decode_c": 0.001},
    )  # fmt: skip
    connection.ensure_connection()
    records = [factories.record(instance=row.pk, prompt_tokens=100 * n, queue_s=0.1, ttft_s=0.1 + n) for n in (1, 2)]
    records_write(connection=connection.connection, records=records)
    charts = viewer.get(reverse("instance", args=[row.pk])).context["charts"]
    dots, line = charts["prefill"]["traces"]
    assert sorted(zip(dots["x"], dots["y"], strict=True)) == [(100, pytest.approx(1.0)), (200, pytest.approx(2.0))]
    assert (line["x"][-1], line["y"][-1]) == (200, pytest.approx(0.21))
    assert [trace["name"] for trace in charts["decode"]["traces"][1:]] == ["model, batch of 1", "model, batch of 8"]
    assert charts["decode"]["traces"][2]["y"][0] == pytest.approx(0.028)


def test_an_instance_that_says_itself_how_many_it_runs_is_shown_so(viewer, live_store):
    one, other = factories.instance(provisioner="static", seqs_unsaid=True), factories.instance(provisioner="static")
    shown = [viewer.get(reverse("instance", args=[row.pk])).content.decode() for row in (one, other)]
    assert ["limit set by the server" in each for each in shown] == [True, False]
    assert ["of at most 32" in each for each in shown] == [False, True]


def test_where_stages_are_apart_each_instance_shows_its_own(viewer, live_store):
    model = factories.served_model()
    for id, role in (("p", "prefill"), ("d", "decode")):
        factories.instance(model, id=id, role=role)
    step = {"kind": "prefill", "reason": "prefilled", "at": 0.6, "figures": {"instance": "p"}}
    shared = {"instance": "d", "prefill_instance": "p", "queue_s": 0.1, "ttft_s": 0.9, "decisions": [step]}
    connection.ensure_connection()
    records_write(connection=connection.connection, records=[factories.record(prompt_tokens=300, **shared)])
    charts = {id: viewer.get(reverse("instance", args=[id])).context["charts"] for id in "pd"}
    (dots,) = charts["p"]["prefill"]["traces"]
    assert (dots["x"], dots["y"]) == ([300], [pytest.approx(0.5)])
    assert len(charts["d"]["decode"]["traces"]) == 1
    assert not charts["p"]["decode"].get("traces")
    assert not charts["d"]["prefill"].get("traces")


def fit_note(viewer, row):
    html = viewer.get(reverse("instance", args=[row.pk])).content.decode()
    note = re.search(r'id="model-title".*?<span class="note">(.*?)</span>\s*</div>', html, re.DOTALL)[1]
    return " ".join(re.sub(r"<[^>]+>", "", note).split())


def test_a_shipped_profile_is_not_called_fitted(viewer, live_store):
    speed = load_profile(demo.PROFILE).coefficients._asdict()
    row = factories.instance(device_kind="gpu", spec={"profile": demo.PROFILE})
    stored = LatencyProfile.objects.create(model=row.model, device_kind="gpu", coefficients=speed, source=demo.PROFILE)
    said = fit_note(viewer, row)
    assert f"Shipped profile {demo.PROFILE}" in said
    assert "not fitted to measurements of this fleet" in said
    assert f"emulates the profile {demo.PROFILE}" in said
    assert "0 samples" not in said
    assert "not recorded" not in said
    stored.source, stored.samples, stored.fit_errors = "profiler: mine.json", 40, {"decode_median": 0.05}
    stored.save()
    said = fit_note(viewer, row)
    assert "from 40 samples, profiler: mine.json; error" in said
    assert "shipped" not in said


def test_a_stored_profile_that_does_not_say_where_it_is_from_is_not_called_fitted_either(viewer, live_store):
    row = factories.instance(device_kind="gpu")
    speed = load_profile(demo.PROFILE).coefficients._asdict()
    LatencyProfile.objects.create(model=row.model, device_kind="gpu", coefficients=speed, source="by hand")
    said = fit_note(viewer, row)
    assert "Stored" in said
    assert "(by hand); not fitted here" in said
    assert "samples" not in said


def test_an_instance_without_a_fit_or_measurements_is_a_page(viewer, live_store):
    answer = viewer.get(reverse("instance", args=[factories.instance(id="a/b:c").pk]))
    assert answer.status_code == 200
    assert b"No profile is stored" in answer.content
    assert viewer.get(reverse("instance", args=["nobody"])).status_code == 404


def test_actions_set_the_desired_state_and_are_audited(operator, live_store):
    row = factories.instance()
    act = {"instance": row.pk, "version": row.version}
    answer = operator.post(reverse("instance-act"), {**act, "action": "drain"}, follow=True)
    assert b"receives no new requests" in answer.content
    row.refresh_from_db()
    assert row.desired_state == "draining"
    stale = operator.post(reverse("instance-act"), {**act, "action": "stop"}, follow=True)
    assert stale.status_code == 412
    assert b"has changed since you opened the page. Nothing was done" in stale.content
    row.refresh_from_db()
    assert row.desired_state == "draining"
    operator.post(reverse("instance-act"), {**act, "version": row.version, "action": "stop"})
    row.refresh_from_db()
    assert row.desired_state == "stopped"
    again = {**act, "version": row.version, "action": "undrain"}
    assert b"cannot be started again" in operator.post(reverse("instance-act"), again, follow=True).content
    assert Decision.objects.filter(subject=row.pk).count() == 2


@pytest.mark.parametrize(
    "bad", [{"action": "explode"}, {"version": ""}, {"version": "x"}, {"version": "²"}, {"version": "9" * 5000}]
)
def test_nonsense_does_nothing(operator, bad):
    row = factories.instance()
    data = {"instance": row.pk, "version": row.version, "action": "stop", **bad}
    assert operator.post(reverse("instance-act"), data).status_code == 400
    row.refresh_from_db()
    assert row.desired_state == "running"


def test_a_viewer_is_refused_and_recorded(viewer):
    row = factories.instance()
    answer = viewer.post(reverse("instance-act"), {"instance": row.pk, "version": 1, "action": "stop"})
    assert answer.status_code == 403
    assert Decision.objects.filter(kind="access_refused").count() == 1


def test_every_component_is_on_the_patterns_page(viewer):
    html = viewer.get(reverse("patterns")).content.decode()
    for part in (
        "banner stale",
        "badge bad",
        "tiles",
        "meter",
        "timeline",
        'class="fields"',
        "empty",
        "summary",
        "chart",
    ):
        assert part in html


def test_a_warm_instance_is_shown_and_given_its_weights(operator, live_store):
    row = factories.instance(weights="absent")
    page = operator.get(reverse("instance", args=[row.pk])).content
    assert b">warm</span>" in page
    assert b"Load weights" in page
    act = {"instance": row.pk, "version": row.version, "action": "load"}
    said = operator.post(reverse("instance-act"), act, follow=True).content
    assert b"is loading its weights. It serves requests once they are loaded." in said
    assert b"Weight loads" in said
    assert b">loading</span>" in said
    assert b"Load weights" not in said
    assert Decision.objects.filter(kind="instance_load_ordered", subject=row.pk).count() == 1
    assert b"loading" in operator.get(reverse("fleet")).content


def test_a_chart_that_can_have_no_points_is_not_drawn(viewer, live_store):
    """Of an instance whose role was another before, what it measured then is shown."""
    model = factories.served_model()
    for id, role in (("p", "prefill"), ("d", "decode"), ("both", "collocated"), ("was", "decode")):
        factories.instance(model, id=id, role=role)
    connection.ensure_connection()
    records_write(connection=connection.connection, records=[factories.record(instance="was", ttft_s=0.9)])
    pages = {id: viewer.get(reverse("instance", args=[id])).content.decode() for id in ("p", "d", "both", "was")}
    drawn = {id: [name for name in ("prefill", "decode") if f'data-chart="{name}"' in pages[id]] for id in pages}
    assert drawn == {
        "p": ["prefill"], "d": ["decode"], "both": ["prefill", "decode"], "was": ["prefill", "decode"]
    }  # fmt: skip
    assert "A prefill instance has no decode measurements." in pages["p"]
    assert "A decode instance has no prefill measurements." in pages["d"]


def test_rows_and_tiles_lead_to_instance_model_and_policy(viewer, live_store):
    row = factories.instance(id="engine-1")
    policy = factories.scaling_policy(row.model)
    html = viewer.get(reverse("fleet")).content.decode()
    assert '<tr class="linked" data-key="engine-1"' in html
    assert html.count(f'href="{reverse("scaling")}#policy-{policy.pk}"') == 2, "tile and row"
    assert html.count(f'href="{reverse("requests")}?model={row.model.name}"') == 2
    assert f'id="policy-{policy.pk}"' in viewer.get(reverse("scaling")).content.decode()
    page = viewer.get(reverse("instance", args=["engine-1"])).content.decode()
    assert f'href="{reverse("scaling")}#policy-{policy.pk}"' in page


def test_instances_on_a_cluster_are_under_its_name(viewer, live_store):
    for id, spec in (("r1", {}), ("r2", {"cluster": "west"})):
        factories.instance(id=id, provisioner="ray", spec=spec, url="")
    factories.instance(id="s1", provisioner="static")
    page = viewer.get(reverse("fleet")).content.decode()
    cells = [each.partition("</section>")[0] for each in page.split('<section class="host" ')[1:]]
    found = {
        each.partition('aria-label="')[2].partition('"')[0]: re.findall(r'<li data-key="(\w+)"', each) for each in cells
    }
    assert {name: ids for name, ids in found.items() if ids} == {
        "Cluster ray/default": ["r1"], "Cluster ray/west": ["r2"], "Unknown host": ["s1"],
    }  # fmt: skip
    assert '<tr class="linked" data-key="r2" data-host="Cluster ray/west"' in page, "the filter finds it"


def test_nodes_of_a_cluster_are_shown_and_stale_when_it_is_away(viewer, live_store):
    node = {"name": "10.0.0.2", "state": "alive", "resources": {"GPU": [0.25, 2.0]}, "labels": {"zone": "a"}}
    look = ProvisionerLook.objects.create(name="ray/default", seen_at=timezone.now(), hosts=[node])
    told = " ".join(viewer.get(reverse("fleet")).content.decode().split())
    assert "Cluster ray/default" in told
    assert "GPU 0.25 of 2" in told
    assert "zone=a" in told
    assert "stale" not in told.partition("Cluster ray/default")[2].partition("</h2>")[2][:200]
    look.failing_since, look.error = timezone.now(), "Away: no answer"
    look.save()
    told = " ".join(viewer.get(reverse("fleet")).content.decode().split())
    assert "stale: it cannot be reached now" in told
    assert 'The provisioner <span class="mono">ray/default</span> has been unreachable' in told
