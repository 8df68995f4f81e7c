"""Priority mappings: levels with their bounds, at most one mapping a tenant."""

import pytest

from controller.models import Decision
from tests import factories
from tests.factories import LEVEL

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_an_operator_creates_and_changes_a_mapping(operator, tenant):
    answer = operator.post("/priority-mappings", {"tenant": tenant.name, "levels": [LEVEL, LEVEL]})
    assert answer.status_code == 201, answer.data
    assert len(answer.data["levels"]) == 2
    address = f"/priority-mappings/{answer.data['id']}"
    answer = operator.patch(address, {"window": 50, "contention": "strict"}, If_Match=answer["ETag"])
    assert (answer.data["window"], answer.data["contention"], answer.data["version"]) == (50, "strict", 2)
    kinds = Decision.objects.filter(actor=operator.user.username).values_list("kind", flat=True)
    assert set(kinds) == {"priority_mapping_created", "priority_mapping_updated"}


def test_a_second_mapping_of_a_tenant_is_a_conflict(operator):
    factories.priority_mapping()
    assert operator.post("/priority-mappings", {"levels": [LEVEL]}).status_code == 409


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"levels": []}, "levels"),
        ({"levels": [LEVEL] * 40}, "levels"),
        ({"levels": "none"}, "levels"),
        ({"levels": [LEVEL, {**LEVEL, "ttft_s": -1}]}, "levels.1.ttft_s"),
        ({"levels": [{"ttft_s": 1}]}, "levels.0.tpot_s"),
        ({"levels": [{**LEVEL, "ttft_s": 9.0}]}, "levels.0.ttft_s"),
        ({"levels": [7]}, "levels.0"),
        ({"window": 0}, "window"),
        ({"contention": "chaos"}, "contention"),
    ],
)
def test_what_is_wrong_is_named(operator, change, field):
    answer = operator.post("/priority-mappings", {"levels": [LEVEL], **change})
    assert answer.status_code == 400, answer.data
    assert any(name.startswith(field) for name in answer.data["error"]["fields"]), answer.data


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s"])
def test_a_level_tighter_than_the_more_urgent_one_above_is_named(operator, name):
    row = factories.priority_mapping(levels=[LEVEL, LEVEL])
    tighter = {**LEVEL, name: LEVEL[name] * 0.9}
    answer = operator.patch(f"/priority-mappings/{row.pk}", {"levels": [LEVEL, tighter, LEVEL], "version": 1})
    assert answer.status_code == 400, answer.data
    told = ["Must not be tighter than the target of the next higher priority."]
    assert answer.data["error"]["fields"] == {f"levels.1.{name}": told}
    row.refresh_from_db()
    assert (row.version, row.levels) == (1, [LEVEL, LEVEL])


def test_a_stale_change_is_a_conflict(operator):
    row = factories.priority_mapping(version=4)
    answer = operator.patch(f"/priority-mappings/{row.pk}", {"window": 5, "version": 3})
    assert answer.data["error"]["code"] == "version_conflict"


def test_a_key_sees_its_own_and_the_shared_mapping(tenant, tenant_key):
    shared, own = factories.priority_mapping(), factories.priority_mapping(tenant=tenant)
    theirs = factories.priority_mapping(tenant=factories.tenant())
    assert {row["id"] for row in tenant_key.get("/priority-mappings").data["items"]} == {shared.pk, own.pk}
    assert tenant_key.get(f"/priority-mappings/{theirs.pk}").status_code == 404


def test_a_mapping_is_removed_with_a_record(operator):
    row = factories.priority_mapping()
    assert operator.delete(f"/priority-mappings/{row.pk}").status_code == 204
    assert Decision.objects.get(kind="priority_mapping_removed").actor == operator.user.username
