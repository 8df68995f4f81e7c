"""Loading weights by hand, and what became of it."""

import pytest

from controller.models import Action, Decision, Instance
from controller.services.fleet.actions import action_end, action_lease, weights_load_order
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def warm():
    return factories.instance(weights="absent", spec={"weights": "absent"})


def test_an_operator_orders_weights_once(operator, viewer, warm):
    answer = operator.post(f"/instances/{warm.pk}/load", {"version": 1})
    assert answer.status_code == 202, answer.data
    assert (answer.data["kind"], answer.data["state"], answer.data["instance"]) == ("weights_load", "queued", warm.pk)
    assert operator.post(f"/instances/{warm.pk}/load").data["id"] == answer.data["id"]
    assert Instance.objects.get(pk=warm.pk).weights == "loading"
    assert viewer.get(f"/actions/{answer.data['id']}").data["actor"] == operator.user.username
    assert [row["id"] for row in viewer.get("/actions", instance=warm.pk, state="queued").data["items"]] == [
        answer.data["id"]
    ]
    assert viewer.get("/actions", state="done").data["items"] == []
    assert viewer.get(f"/instances/{warm.pk}").data["weights"] == "loading"
    assert Decision.objects.filter(kind="instance_load_ordered", actor=operator.user.username).count() == 1


def test_sources_may_be_named(operator, warm):
    sources = [{"kind": "engine", "url": "http://10.0.0.1:8100"}, {"kind": "disk"}]
    answer = operator.post(f"/instances/{warm.pk}/load", {"sources": sources})
    assert answer.status_code == 202, answer.data
    assert Action.objects.get().params["sources"] == sources


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [{"kind": "tape"}],
        [{"kind": "engine"}],
        [{"kind": "engine", "url": "ftp://x"}],
        [{"kind": "disk", "url": "http://x"}],
        [{"kind": "disk"}] * 9,
        "disk",
    ],
)
def test_a_wrong_source_is_named(operator, warm, sources):
    answer = operator.post(f"/instances/{warm.pk}/load", {"sources": sources})
    assert answer.status_code == 400, answer.data
    assert any(name.startswith("sources") for name in answer.data["error"]["fields"]), answer.data
    assert not Action.objects.exists()


def test_what_cannot_be_loaded_is_refused(operator, warm):
    assert operator.post(f"/instances/{warm.pk}/load", {"version": 9}).status_code == 412
    theirs = factories.instance(backend="vllm")
    assert "backend" in operator.post(f"/instances/{theirs.pk}/load").data["error"]["fields"]
    draining = factories.instance(desired_state="draining")
    assert "desired_state" in operator.post(f"/instances/{draining.pk}/load").data["error"]["fields"]
    assert operator.post("/instances/nobody/load").status_code == 404


def test_a_policy_keeps_warm_instances(operator):
    model = factories.served_model()
    answer = operator.post("/scaling-policies", {"model": model.name, "warm": 2})
    assert answer.data["warm"] == 2, answer.data
    path = f"/scaling-policies/{answer.data['id']}"
    assert operator.patch(path, {"warm": 0, "version": 1}).data["warm"] == 0
    assert "warm" in operator.patch(path, {"warm": -1, "version": 2}).data["error"]["fields"]
    assert operator.patch(path, {"warm": None, "version": 2}).data["warm"] is None, "as many as devices allow"


def test_a_policy_that_does_not_say_leaves_it_to_the_devices(operator):
    assert operator.post("/scaling-policies", {"model": factories.served_model().name}).data["warm"] is None


def test_a_spec_says_present_or_absent(operator):
    body = {"model": factories.served_model().name, "backend": "reference", "provisioner": "process"}
    assert operator.post("/instances", {**body, "spec": {"weights": "absent"}}).data["weights"] == "absent"
    assert "spec.weights" in operator.post("/instances", {**body, "spec": {"weights": "some"}}).data["error"]["fields"]


def test_what_moved_over_which_link_and_how_fast(viewer, admin, warm):
    near, far = factories.host(name="near"), factories.host(name="far")
    source = factories.instance(warm.model, id="source", host=far)
    Instance.objects.filter(pk=warm.pk).update(host=near)
    link = admin.post(
        "/links", {"source": "far", "target": "near", "medium": "rdma", "bandwidth_bytes_s": 25e9}
    ).data  # fmt: skip
    assert (link["moved"], link["failed"], link["measured_bytes_s"], link["last_error"]) == (0, 0, None, "")
    action = weights_load_order(actor=factories.ACTOR, instance_id=warm.pk)
    attempts = [
        {"kind": "engine", "source": source.pk, "bytes": 0, "seconds": 1.0, "error": "cut", "url": source.url},
        {
            **{"kind": "engine", "source": source.pk, "bytes": 30, "seconds": 5.0, "error": "", "url": source.url},
            **{"flow": "scheduled", "held_s": 3.0, "level": 8},
        },
    ]
    action_end(
        action=action_lease(action_id=action.pk), state="done", kind="weights_load", subject=("instance", warm.pk),
        reason="from_engine", inputs={}, outcome={}, attempts=attempts,
    )  # fmt: skip
    rows = viewer.get("/transfers", target=warm.pk).data["items"]
    assert [(row["attempt"], row["state"], row["bytes_s"], row["link"]) for row in rows] == [
        (2, "done", 15.0, link["id"]), (1, "failed", None, link["id"]),
    ]  # fmt: skip
    row = viewer.get(f"/transfers/{rows[0]['id']}").data
    assert (row["source"], row["flow"], row["held_s"], row["flow_level"]) == ("source", "scheduled", 3.0, 8)
    assert viewer.get("/transfers", state="failed", link=link["id"]).data["items"][0]["error"] == "cut"
    link = viewer.get(f"/links/{link['id']}").data
    moving = "held time is no bandwidth"
    assert (link["moved"], link["failed"], link["measured_bytes_s"], link["last_error"]) == (1, 1, 15.0, "cut"), moving
