"""ETag and If-Match: the second of two operators sees what the first one saved, and a change names its version."""

import pytest

from controller.models import Decision
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_one_object_and_each_item_of_a_list_has_its_etag(operator):
    row = factories.slo_class(version=3)
    one = operator.get(f"/slo-classes/{row.pk}")
    assert (one["ETag"], one.data["etag"]) == ('"3"', '"3"')
    assert operator.get("/slo-classes").data["items"][0]["etag"] == '"3"'


def test_the_second_of_two_operators_sees_what_the_other_saved(operator):
    row = factories.slo_class(ttft_s=1.0, tpot_s=0.1, deadline_s=None, title="")
    operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0, "title": "Chat"}, If_Match='"1"')
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": "3.0", "tpot_s": 0.1, "deadline_s": 9}, If_Match='"1"')
    assert answer.status_code == 412
    error = answer.data["error"]
    assert error["current"] == operator.get(f"/slo-classes/{row.pk}").data
    assert error["differences"] == [
        {"field": "ttft_s", "stored": 2.0, "sent": 3.0},
        {"field": "deadline_s", "stored": None, "sent": 9.0},
    ]
    again = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 3.0}, If_Match=answer["ETag"])
    assert (again.status_code, again.data["ttft_s"], again["ETag"]) == (200, 3.0, '"3"')


@pytest.mark.parametrize(
    ("made", "path", "change"),
    [
        (factories.tenant, "/tenants/{}", {"rpm": 5}),
        (factories.priority_mapping, "/priority-mappings/{}", {"window": 5}),
        (factories.scaling_policy, "/scaling-policies/{}", {"max_instances": 9}),
        (factories.instance, "/instances/{}", {"unit_cost": 3.0}),
        (factories.host, "/hosts/{}", {"zone": "z9"}),
        (factories.served_model, "/models/{}", {"context_tokens": 9}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_every_versioned_object_answers_alike(admin, made, path, change):
    path = path.format(made().pk)
    stale, (name,) = '"9"', change
    assert admin.get(path)["ETag"] == '"1"'
    assert admin.patch(path, change).status_code == 428
    answer = admin.patch(path, change, If_Match=stale)
    assert answer.status_code == 412, answer.data
    assert answer.data["error"]["differences"][0]["field"] == name
    gone = admin.delete(path, If_Match=stale)
    assert (gone.status_code, gone.data["error"]["current"]["etag"]) == (412, '"1"')
    assert admin.patch(path, change, If_Match='"1"')["ETag"] == '"2"'
    assert not Decision.objects.filter(kind__endswith="_removed").exists()


def test_a_change_without_a_version_is_told_what_to_send(operator):
    row = factories.slo_class()
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0})
    assert (answer.status_code, answer.data["error"]["code"]) == (428, "precondition_required")
    assert "If-Match" in answer.data["error"]["message"]


def test_a_star_overwrites_whichever_version_is_stored(operator):
    row = factories.slo_class(version=7)
    assert operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0}, If_Match="*")["ETag"] == '"8"'


def test_an_action_with_a_stale_version_shows_the_instance(operator):
    row = factories.instance()
    answer = operator.post(f"/instances/{row.pk}/drain", {"version": 9})
    assert answer.status_code == 412
    assert answer.data["error"]["current"]["id"] == row.pk


def test_the_etag_of_a_removed_object_does_not_match_its_successor(operator):
    path, value = "/slo-classes/by-name/chat", {"ttft_s": 1.0, "tpot_s": 0.1}
    first = operator.put(path, value)
    operator.delete(path)
    second = operator.put(path, {**value, "ttft_s": 2.0})
    assert (first.status_code, second.status_code) == (201, 201)
    assert first["ETag"] != second["ETag"]
    stale = operator.put(path, {**value, "tpot_s": 0.2}, If_Match=first["ETag"])
    assert (stale.status_code, stale.data["error"]["current"]["ttft_s"]) == (412, 2.0)
    assert operator.put(path, {**value, "tpot_s": 0.2}, If_Match=second["ETag"]).status_code == 200
