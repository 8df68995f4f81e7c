"""What an engine was started with: only what is set, and no secrets."""

from __future__ import annotations

import pytest
from django.urls import reverse

from console.wording.engine_spec import HIDDEN, engine_spec
from controller.engine.process_spec import SAYABLE
from tests import factories


def told(spec):
    return {each.raw: each.value for each in engine_spec(spec)}


def test_what_is_set_is_said_as_it_was_given_and_nothing_else():
    spec = {
        "folder": "/models/qwen", "executor": "torch", "scheduler": "slackline", "threads": 2, "kv_cache_gib": 0.05,
        "deadlines": True, "keep_room": False, "profile": "", "batching_options": {"credit": 3, "fair": True},
        "start_after": 0, "dtype": None,
    }  # fmt: skip
    assert told(spec) == {
        "folder": "/models/qwen", "executor": "torch", "scheduler": "slackline", "threads": "2", "kv_cache_gib": "0.05",
        "deadlines": "yes", "keep_room": "no", "batching_options": "credit 3, fair yes",
        "start_after": "1970-01-01 00:00:00 UTC",
    }  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        {"api_key": "sk-1"},
        {"hf_token": "sk-1"},
        {"Authorization": "sk-1"},
        {"env": {"HF_TOKEN": "sk-1"}},
        {"env": [{"password": "sk-1"}]},
        {"url": "http://sk-1:sk-1@engine.internal:8000"},
        {"proxies": ["http://sk-1@proxy"]},
    ],
)
def test_what_reads_like_a_secret_stays_hidden(spec):
    (setting,) = engine_spec(spec)
    assert "sk-1" not in f"{setting.value} {setting.raw}"


def test_no_option_of_our_own_engine_is_taken_for_a_secret():
    assert HIDDEN not in told(dict.fromkeys(SAYABLE, 1)).values()


def test_it_is_on_the_page_of_the_instance_alone(viewer, live_store):
    row = factories.instance(spec={"scheduler": "slackline", "folder": "/models/<b>"})
    html = viewer.get(reverse("instance", args=[row.pk])).content.decode()
    assert "Engine settings" in html
    assert "/models/&lt;b&gt;" in html
    assert "/models/" not in viewer.get(reverse("fleet")).content.decode()
    assert "/models/&lt;b&gt;" in viewer.get(reverse("instance-live", args=[row.pk])).json()["html"]


def test_where_nothing_is_set_the_page_says_so(viewer, live_store):
    ours, theirs = factories.instance(), factories.instance(provisioner="static")
    assert "uses its defaults" in viewer.get(reverse("instance", args=[ours.pk])).content.decode()
    assert "not started by Slackline" in viewer.get(reverse("instance", args=[theirs.pk])).content.decode()
