"""Registering a server through the form: with its key by name, audited, refused with the field that is wrong."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controller.models import Decision, Instance
from tests import factories
from workers.actions.instance_keys import key_of
from workers.http import engine_keys
from workers.http.engine_keys import NoEngineKey

URL = "http://127.0.0.1:8001"


@pytest.fixture
def model(db, live_store, announced):
    return factories.served_model(name="llama")


def entered(served, **other):
    """What a browser sends for a form that was left as it is, but for what is needed."""
    fields = {"id": "gpu-1", "model": served.pk, "url": URL, "backend": "vllm", "role": "collocated", "kv_role": ""}
    rest = {"key_name": "", "max_num_seqs": "", "host": "", "device_kind": "", "tp": "1", "unit_cost": "1.0"}
    return fields | rest | other


def register(client, served, **other):
    return client.post(reverse("instance-new"), entered(served, **other))


def test_a_server_with_a_key_is_registered_by_the_keys_name(operator, model, announced, tmp_path, monkeypatch):
    answer = register(operator, model, key_name="gpu-key", role="decode", max_num_seqs="64", device_kind="h100")
    assert (answer.status_code, answer["location"]) == (302, reverse("instance", args=["gpu-1"]))
    row = Instance.objects.get()
    kept = (row.pk, row.url, row.provisioner, row.backend, row.role, row.configured_seqs, row.device_kind, row.key_name)
    assert kept == ("gpu-1", URL, "static", "vllm", "decode", 64, "h100", "gpu-key")
    assert announced == [1]
    page = operator.get(answer["location"]).content.decode()
    assert "gpu-1 registered. It receives requests once it responds." in page
    assert 'file <span class="mono">gpu-key</span>' in page
    monkeypatch.setenv("ENGINE_KEYS_DIR", str(tmp_path))
    monkeypatch.setattr(engine_keys, "CHECKED_S", 0.0)
    (tmp_path / "gpu-key").write_text(f"{URL} sk-of-gpu-1\n")
    assert key_of(row).headers() == {"Authorization": "Bearer sk-of-gpu-1"}
    (tmp_path / "gpu-key").write_text("http://127.0.0.1:8002 sk-of-gpu-1\n")
    with pytest.raises(NoEngineKey, match="is for"):
        key_of(row).headers()


def test_it_is_audited_under_the_name_of_the_person(operator, model):
    register(operator, model, key_name="gpu-key")
    decision = Decision.objects.get(kind="instance_created")
    assert (decision.actor_type, decision.subject) == ("person", "gpu-1")
    assert decision.inputs["after"]["key_name"] == "gpu-key"


def test_without_a_number_the_servers_own_counts(operator, model):
    register(operator, model)
    assert Instance.objects.get().configured_seqs is None


@pytest.mark.parametrize(
    ("other", "field", "words"),
    [
        ({"key_name": "sk-4f1e9a"}, "key_name", "This looks like a key"),
        ({"key_name": "../../etc/passwd"}, "key_name", "Use letters, digits"),
        ({"url": "http://169.254.169.254/latest"}, "url", "clouds serve credentials"),
        ({"url": "http://user:secret@127.0.0.1:8001"}, "url", "Must not have a user or password"),
        ({"url": "gpu-1:8001"}, "url", "Must be an http:// or https:// URL"),
        ({"id": "two words"}, "id", "Use letters, digits"),
        ({"id": ""}, "id", "required"),
        ({"model": "999999"}, "model", "valid choice"),
        ({"backend": "fake"}, "backend", "valid choice"),
        ({"backend": "sglang", "kv_role": "kv_both"}, "kv_role", "Only a vLLM server has a KV role"),
        ({"kv_role": "kv_producer", "role": "decode"}, "role", "cannot decode"),
        ({"max_num_seqs": "0"}, "max_num_seqs", "greater than or equal to 1"),
        ({"unit_cost": "nan"}, "unit_cost", "Enter a number"),
        ({"backend": "reference", "tp": "99999"}, "tp", "less than or equal to 1024"),
    ],
)
def test_what_is_wrong_is_said_at_its_field(operator, model, announced, other, field, words):
    answer = register(operator, model, **other)
    assert answer.status_code == 422
    assert set(answer.context["form"].errors) == {field}
    assert words in str(answer.context["form"].errors[field])
    assert not Instance.objects.exists()
    assert announced == []


def test_a_name_and_a_url_in_use_are_refused(operator, model):
    register(operator, model)
    name = register(operator, model, url="http://127.0.0.1:8002")
    assert "exists and is in use" in str(name.context["form"].errors["id"])
    url = register(operator, model, id="gpu-2", url=f"{URL}/")
    assert "gpu-1 is registered with this URL" in str(url.context["form"].errors["url"])
    Instance.objects.update(desired_state="stopped", observed_state="stopped")
    assert "exists and is stopped" in str(register(operator, model).context["form"].errors["id"])
    assert register(operator, model, id="gpu-2").status_code == 302


def test_a_viewer_may_not_and_the_attempt_is_recorded(viewer, model):
    assert viewer.get(reverse("instance-new")).status_code == 403
    assert register(viewer, model).status_code == 403
    assert not Instance.objects.exists()
    assert Decision.objects.filter(kind="access_refused").count() == 1
    assert b"Register server" not in viewer.get(reverse("fleet")).content


def test_the_form_asks_before_it_is_sent_and_says_what_is_missing(operator, db, live_store):
    html = operator.get(reverse("instance-new")).content.decode()
    assert 'data-confirm="Register this server?"' in html
    assert "There is no model yet." in html
    factories.served_model(name="llama")
    assert "There is no model yet." not in operator.get(reverse("instance-new")).content.decode()
