"""Editing an instance through the form: what is stored, refused, and shown when somebody else saved first."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controller.models import Decision
from tests import factories


@pytest.fixture
def server(db, live_store, announced):
    return factories.instance(id="gpu-1", provisioner="static", backend="vllm", key_name="old", max_num_seqs=16)


def edit(client, row, **other):
    fields = {"key_name": "old", "configured_seqs": "16", "host": "", "device_kind": "", "unit_cost": "1.0"}
    data = fields | {"version": str(row.version)} | other
    return client.post(reverse("instance-edit", args=[row.pk]), data)


def test_the_name_of_its_key_is_changed_and_audited(operator, server, announced):
    answer = edit(operator, server, key_name="new.key", unit_cost="2.5")
    assert (answer.status_code, answer["location"]) == (302, reverse("instance", args=["gpu-1"]))
    server.refresh_from_db()
    assert (server.key_name, server.unit_cost, server.version) == ("new.key", 2.5, 2)
    assert announced == [1]
    decision = Decision.objects.get(kind="instance_updated")
    assert (decision.actor_type, decision.subject) == ("person", "gpu-1")
    page = operator.get(answer["location"]).content.decode()
    assert "gpu-1 updated." in page
    assert 'file <span class="mono">new.key</span>' in page


def test_without_a_limit_the_one_that_the_server_reports_holds(operator, server):
    assert edit(operator, server, configured_seqs="").status_code == 302
    server.refresh_from_db()
    assert server.configured_seqs is None
    assert 'name="configured_seqs"' in operator.get(reverse("instance-edit", args=["gpu-1"])).content.decode()


def test_a_host_is_chosen(operator, server):
    host = factories.host()
    assert edit(operator, server, host=str(host.pk), device_kind="h100").status_code == 302
    server.refresh_from_db()
    assert (server.host, server.device_kind) == (host, "h100")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"key_name": "sk-abcdef"}, "This looks like a key. Enter the name of the file that the key is in."),
        ({"key_name": "../secret"}, "Use letters, digits and . _ - and start with a letter or digit."),
        ({"configured_seqs": "0"}, "Ensure this value is greater than or equal to 1."),
        ({"unit_cost": "-1"}, "Ensure this value is greater than or equal to 0."),
    ],
)
def test_what_is_wrong_is_told_at_its_field_and_nothing_is_changed(operator, server, other, message):
    answer = edit(operator, server, **other)
    assert answer.status_code == 422
    assert message in answer.content.decode()
    server.refresh_from_db()
    assert (server.version, server.key_name) == (1, "old")


def test_one_that_slackline_started_has_no_key_of_its_own_and_needs_a_limit(operator, db, live_store, announced):
    row = factories.instance()
    assert 'name="key_name"' not in operator.get(reverse("instance-edit", args=[row.pk])).content.decode()
    assert edit(operator, row, configured_seqs="").status_code == 422
    assert edit(operator, row, configured_seqs="8", key_name="taken").status_code == 302
    row.refresh_from_db()
    assert (row.max_num_seqs, row.key_name) == (8, "")


def test_nothing_changed_is_told(operator, server):
    answer = edit(operator, server)
    assert "No changes." in operator.get(answer["location"]).content.decode()
    assert not Decision.objects.filter(kind="instance_updated").exists()


def test_who_saves_second_sees_both_values_and_may_overwrite(operator, server):
    edit(operator, server, key_name="first")
    answer = edit(operator, server, key_name="second")
    assert answer.status_code == 412
    page = answer.content.decode()
    assert all(text in page for text in ("first", "second", "Overwrite with my changes"))
    server.refresh_from_db()
    assert server.key_name == "first"
    assert edit(operator, server, key_name="second").status_code == 302
    server.refresh_from_db()
    assert server.key_name == "second"


def test_only_operators_edit_and_only_what_exists(viewer, operator, server):
    assert viewer.get(reverse("instance-edit", args=["gpu-1"])).status_code == 403
    assert "Edit" not in viewer.get(reverse("instance", args=["gpu-1"])).content.decode()
    assert (
        reverse("instance-edit", args=["gpu-1"]) in operator.get(reverse("instance", args=["gpu-1"])).content.decode()
    )
    assert operator.get(reverse("instance-edit", args=["nobody"])).status_code == 404
