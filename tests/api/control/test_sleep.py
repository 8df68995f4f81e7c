"""Sleep and wake-up by hand."""

import pytest

from controller.models import Action, Decision, Instance
from controller.services.fleet.actions import action_end, action_lease
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def awake():
    return factories.instance(backend="vllm", provisioner="static")


def asleep(row):
    action = Action.objects.get(instance=row, kind="sleep")
    action_end(
        action=action_lease(action_id=action.pk), state="done", kind="instance_asleep", subject=("instance", row.pk),
        reason="level_1", inputs={}, outcome={},
    )  # fmt: skip


def test_an_operator_puts_to_sleep_once_and_wakes_once(operator, viewer, awake):
    answer = operator.post(f"/instances/{awake.pk}/sleep", {"level": 2, "version": 1})
    assert answer.status_code == 202, answer.data
    assert (answer.data["kind"], answer.data["state"], answer.data["params"]) == ("sleep", "queued", {"level": 2})
    assert operator.post(f"/instances/{awake.pk}/sleep", {"level": 2}).data["id"] == answer.data["id"]
    assert viewer.get(f"/instances/{awake.pk}").data["weights"] == "leaving"
    assert operator.post(f"/instances/{awake.pk}/wake").status_code == 400
    asleep(awake)
    shown = viewer.get(f"/instances/{awake.pk}").data
    assert (shown["weights"], shown["sleep_level"]) == ("asleep", 2)
    woken = operator.post(f"/instances/{awake.pk}/wake")
    assert (woken.status_code, woken.data["kind"]) == (202, "wake")
    assert operator.post(f"/instances/{awake.pk}/wake").data["id"] == woken.data["id"]
    ordered = Decision.objects.filter(actor=operator.user.username, kind__endswith="_ordered").order_by("id")
    assert list(ordered.values_list("kind", flat=True)) == ["instance_sleep_ordered", "instance_wake_ordered"]


def test_the_lighter_sleep_is_what_is_meant(operator, awake):
    assert operator.post(f"/instances/{awake.pk}/sleep").data["params"] == {"level": 1}


@pytest.mark.parametrize("level", [0, 3, "deep", None])
def test_another_level_is_refused_by_name(operator, awake, level):
    answer = operator.post(f"/instances/{awake.pk}/sleep", {"level": level})
    assert (answer.status_code, list(answer.data["error"]["fields"])) == (400, ["level"])
    assert Instance.objects.get(pk=awake.pk).weights == "present"


def test_who_may_and_on_which_version(operator, viewer, awake):
    for verb in ("sleep", "wake"):
        assert viewer.post(f"/instances/{awake.pk}/{verb}").status_code == 403
        assert operator.post(f"/instances/{awake.pk}/{verb}", {"version": 9}).status_code == 412
        assert operator.post(f"/instances/nobody/{verb}").status_code == 404
    assert not Action.objects.exists()


def test_what_is_awake_cannot_be_woken(operator, awake):
    answer = operator.post(f"/instances/{awake.pk}/wake")
    assert (answer.status_code, list(answer.data["error"]["fields"])) == (400, ["weights"])
