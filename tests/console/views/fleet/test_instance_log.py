"""The log of an engine on its page: for operators, escaped, and told where there is none."""

from __future__ import annotations

import pytest
from django.urls import reverse

from tests import factories


@pytest.fixture
def data(db, live_store, settings, tmp_path):
    for name in ("engines", "logs"):
        (tmp_path / name).mkdir()
    settings.DATA_DIR = tmp_path
    return tmp_path


def page(client, row, name="instance-log"):
    return client.get(reverse(name, args=[row.pk]))


def test_its_last_lines_are_shown_escaped_and_update(operator, data):
    row = factories.instance(id="gpu-1")
    log = data / "logs" / "engine-gpu-1.log"
    log.write_text("loading <weights>\n")
    html = page(operator, row).content.decode()
    assert "loading &lt;weights&gt;" in html
    assert "Last written" in html
    log.write_text("loading <weights>\nready\n")
    assert "ready" in page(operator, row, "instance-log-live").json()["html"]
    assert reverse("instance-log", args=["gpu-1"]) in page(operator, row, "instance").content.decode()


def test_the_control_api_has_the_same(operator, data):
    row = factories.instance(id="gpu-1")
    address = "/api/v1/instances/gpu-1/log"
    assert operator.get(address).json() == {"text": "", "truncated": False, "written_at": None}
    (data / "logs" / "engine-gpu-1.log").write_text("ready\n")
    found = operator.get(address).json()
    assert (found["text"], found["truncated"]) == ("ready\n", False)
    assert found["written_at"].endswith("Z")
    assert operator.get(f"/api/v1/instances/{row.pk}-not/log").status_code == 404


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "No log on this machine"),
        ({"provisioner": "static"}, "Slackline did not start this engine"),
    ],
)
def test_where_there_is_none_it_says_why(operator, data, fields, message):
    row = factories.instance(**fields)
    assert message in page(operator, row).content.decode()


def test_an_empty_or_unreadable_log_is_told(operator, data):
    row = factories.instance(id="gpu-1")
    log = data / "logs" / "engine-gpu-1.log"
    log.touch()
    assert "No output yet" in page(operator, row).content.decode()
    log.unlink()
    log.mkdir()
    assert "The log cannot be read: Is a directory." in page(operator, row).content.decode()
    answer = operator.get("/api/v1/instances/gpu-1/log")
    assert (answer.status_code, answer["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "log_unavailable"
    assert answer.json()["error"]["message"] == "The log cannot be read: Is a directory."


def test_viewers_do_not_see_it(viewer, data):
    row = factories.instance()
    assert page(viewer, row).status_code == 403
    assert page(viewer, row, "instance-log-live").status_code == 403
    assert reverse("instance-log", args=[row.pk]) not in page(viewer, row, "instance").content.decode()


def test_a_registered_server_has_no_button_for_it(operator, data):
    row = factories.instance(provisioner="static")
    assert reverse("instance-log", args=[row.pk]) not in page(operator, row, "instance").content.decode()
