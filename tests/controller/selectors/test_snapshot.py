"""The gateway's snapshot: whole, consistent with its version, and in a fixed number of queries."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from controller.core.snapshot import snapshot_from_json
from controller.core.types import LatencyCoefficients
from controller.models import ConfigVersion, Instance, LaunchTemplate, ScalingPolicy
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.launch_templates import launch_template_pause, launch_template_resume
from controller.services.fleet.lifecycle import start_steps_seen
from controller.services.fleet.scaling_policies import (
    scaling_policy_create,
    scaling_policy_remove,
    scaling_policy_update,
)
from controller.services.fleet.served_models import latency_profile_set
from tests import factories

pytestmark = pytest.mark.django_db
SPEED = LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 1e-7, 1e-4)


def everything() -> Instance:
    shared = factories.slo_class(name="fast")
    tenant = factories.tenant(name="acme", default_class=shared, rpm=60)
    factories.slo_class(name="fast", tenant=tenant, ttft_s=0.5)
    factories.priority_mapping(tenant=tenant)
    factories.api_key(tenant)
    model = factories.served_model(aliases=["small"], context_tokens=8192, tokenizer="/models/small/tokenizer.json")
    latency_profile_set(actor=factories.ACTOR, model=model, device_kind="a100", coefficients=SPEED)
    return factories.instance(model, device_kind="a100", max_num_seqs=16, spec={"kv_capacity_tokens": 1000})


def test_it_holds_what_is_configured():
    row = everything()

    snapshot = gateway_snapshot()

    assert snapshot.version == config_version()
    (tenant,) = snapshot.tenants
    assert (tenant.name, tenant.default_class, tenant.rpm) == ("acme", "fast", 60)
    assert {(entry.tenant, entry.ttft_s) for entry in snapshot.classes} == {(None, 1.0), ("acme", 0.5)}
    assert snapshot.mappings[0].levels[0].ttft_max_s == 1.25
    assert (snapshot.models[0].aliases, snapshot.models[0].tokenizer) == (("small",), "/models/small/tokenizer.json")
    (spec,) = snapshot.instances
    assert (spec.id, spec.url, spec.latency) == (row.id, row.url, SPEED)
    assert (spec.max_num_seqs, spec.kv_capacity_tokens, spec.max_model_len) == (16, 1000, 8192)


def test_it_survives_the_trip_to_disk():
    everything()
    snapshot = gateway_snapshot()

    assert snapshot_from_json(json.loads(json.dumps(asdict(snapshot)))) == snapshot


@pytest.mark.parametrize(
    ("fields", "serves"),
    [
        ({}, True),
        ({"desired_state": "draining"}, True),
        ({"desired_state": "stopped"}, False),
        ({"observed_state": "starting"}, False),
        ({"observed_state": "unreachable"}, False),
        ({"observed_state": "failed"}, False),
        ({"url": ""}, False),
    ],
)
def test_only_what_can_serve_is_in_it(fields, serves):
    factories.instance(**fields)

    assert bool(gateway_snapshot().instances) == serves


def test_its_queries_do_not_grow_with_what_is_configured(django_assert_num_queries):
    everything()
    for _ in range(5):
        factories.instance(factories.served_model())
        factories.api_key()

    with django_assert_num_queries(10):
        snapshot = gateway_snapshot()

    assert (len(snapshot.models), len(snapshot.instances), len(snapshot.keys)) == (6, 6, 6)


def test_without_its_row_the_version_is_zero(django_assert_num_queries):
    ConfigVersion.objects.all().delete()

    with django_assert_num_queries(1):
        assert config_version() == 0


def test_it_names_what_is_on_its_way():
    Desired, Observed = Instance.Desired, Instance.Observed
    model = factories.served_model(name="m")
    rows = {
        "pending": {"observed_state": Observed.PENDING, "url": "", "spec": {"start_after": 99.5}},
        "starting": {"observed_state": Observed.STARTING},
        "waking": {"observed_state": Observed.READY, "weights": "waking"},
        "ready": {"observed_state": Observed.READY},
        "warm": {"observed_state": Observed.STARTING, "weights": "absent"},
        "decodes": {"observed_state": Observed.STARTING, "role": "decode"},
        "unwanted": {"observed_state": Observed.STARTING, "desired_state": Desired.STOPPED},
        "leaves": {"observed_state": Observed.STARTING, "desired_state": Desired.DRAINING},
        "failed": {"observed_state": Observed.FAILED},
    }
    for name, fields in rows.items():
        factories.instance(model, id=name, **fields)
    coming = {each.id: (each.model, each.not_before) for each in gateway_snapshot().coming}
    assert coming == {"pending": ("m", 99.5), "starting": ("m", 0.0), "waking": ("m", 0.0)}


def test_it_says_when_a_start_from_a_template_is_likely_to_end(django_assert_num_queries):
    template = LaunchTemplate.objects.create(name="t", backend="vllm", command=["vllm"])
    model = factories.served_model(name="m")
    starting = {"observed_state": Instance.Observed.STARTING, "template": template, "backend": template.backend}
    took = {"process": 100.0, "ready": 130.0}
    factories.instance(model, id="done", template=template, start_steps=took)
    slow = LaunchTemplate.objects.create(name="slow", backend="vllm", command=["vllm"])
    for number, took_s in enumerate((900.0, 900.0, 40.0, 60.0, 60.0, 80.0, 80.0)):  # only the last five count
        steps = {"process": 100.0, "ready": 100.0 + took_s}
        row = factories.instance(model, id=f"slow-{number}", template=slow, start_steps=steps)
        Instance.objects.filter(pk=row.pk).update(created_at=timezone.now() - timedelta(days=9 - number))
    factories.instance(factories.served_model(name="other"), id="other's", template=slow, start_steps=took)
    rows = {
        "began": {"start_steps": {"process": 500.0}},
        "ordered": {},
        "later": {"spec": {"start_after": 4e9}},
        "slower": {"template": slow, "start_steps": {"process": 500.0}},
        "new": {"template": LaunchTemplate.objects.create(name="new", backend="vllm", command=["vllm"])},
        "again": {"ready_at": timezone.now()},
        "plain": {"template": None},
    }
    for name, fields in rows.items():
        factories.instance(model, id=name, **{**starting, **fields})
    created = Instance.objects.get(pk="ordered").created_at.timestamp()
    with django_assert_num_queries(11):
        found = {each.id: each.serves_at for each in gateway_snapshot().coming}
    known = {"began": 530.0, "ordered": created + 30.0, "later": 4e9 + 30.0, "slower": 560.0}
    assert found == {**known, "again": 0.0, "plain": 0.0, "new": 0.0}


@pytest.mark.parametrize(("worker_s", "gateway_s"), [(5.0, 0.0), (0.0, -5.0), (-3600.0, 5.0)])
def test_clocks_of_a_worker_and_a_gateway_may_differ(monkeypatch, worker_s, gateway_s):
    """How long an engine has been starting is counted on one clock."""
    template = LaunchTemplate.objects.create(name="t", backend="vllm", command=["vllm"])
    model = factories.served_model(name="m")
    factories.instance(model, id="before", template=template, start_steps={"process": 100.0, "ready": 130.0})
    starting = {"observed_state": Instance.Observed.STARTING, "template": template, "backend": template.backend}
    factories.instance(model, id="one", **starting)
    true = time.time
    monkeypatch.setattr("controller.postgres.clock.time.time", lambda: true() + worker_s)
    start_steps_seen(seen={"one": {"process": true() + worker_s - 10.0}})
    monkeypatch.setattr("controller.postgres.clock.time.time", lambda: true() + gateway_s)
    (found,) = gateway_snapshot().coming
    assert found.serves_at - (true() + gateway_s) == pytest.approx(20.0, abs=1.0)


def scaled(name: str, *, policy: dict[str, Any] | None = None, **fields: Any) -> None:
    """A model with a policy whose only instance is gone."""
    model = factories.served_model(name=name)
    scaling_policy_create(actor=factories.ACTOR, model=model, min_instances=0, **(policy or {}))
    gone = {"desired_state": "stopped", "observed_state": "stopped", "provisioner": "process"}
    factories.instance(model, **{**gone, **fields})


def test_it_names_models_of_which_a_request_has_an_instance_started(django_assert_num_queries):
    paused = LaunchTemplate.objects.create(name="paused", backend="vllm", command=["vllm"], paused_at=timezone.now())
    scaled("gone")
    scaled("prefills", policy={"role": "prefill"}, role="prefill")
    scaled("serves", desired_state="running", observed_state="ready")
    scaled("disabled", policy={"enabled": False})
    scaled("decodes", policy={"role": "decode"}, role="decode")
    scaled("other role", role="prefill")
    scaled("registered", provisioner="static")
    scaled("refused", error=f"{Instance.SETTINGS_REFUSED} by the engine")
    scaled("paused", template=paused, backend=paused.backend)
    scaling_policy_create(actor=factories.ACTOR, model=factories.served_model(name="never"), min_instances=0)
    factories.instance(factories.served_model(name="unscaled"), provisioner="process", observed_state="stopped")
    with django_assert_num_queries(11):
        assert gateway_snapshot().on_demand == ("gone", "prefills", "serves")


def test_gateways_hear_of_what_decides_whether_an_instance_is_started():
    template = LaunchTemplate.objects.create(name="t", backend="vllm", command=["vllm"])
    scaled("m", template=template, backend=template.backend)
    policy = ScalingPolicy.objects.get()
    seen = [config_version()]

    def heard() -> tuple[str, ...]:
        version = config_version()
        assert version > seen[-1], "gateways would not read the configuration again"
        seen.append(version)
        return gateway_snapshot().on_demand

    assert gateway_snapshot().on_demand == ("m",)
    launch_template_pause(actor=SYSTEM, row=template, instance="i", failures=3, error="exit 1")
    assert heard() == ()
    launch_template_resume(actor=factories.ACTOR, template_id=template.pk)
    assert heard() == ("m",)
    scaling_policy_update(actor=factories.ACTOR, policy_id=policy.pk, version=None, changes={"enabled": False})
    assert heard() == ()
    scaling_policy_update(actor=factories.ACTOR, policy_id=policy.pk, version=None, changes={"enabled": True})
    assert heard() == ("m",)
    scaling_policy_remove(actor=factories.ACTOR, policy_id=policy.pk)
    assert heard() == ()


@pytest.mark.parametrize(
    ("spec", "role", "selects"),
    [
        ({}, "collocated", False),
        ({"batching": "calm"}, "collocated", True),
        ({"batching": "nobody's"}, "collocated", False),
        ({"batching": ["calm"]}, "collocated", False),
        ({"scheduler": "slackline"}, "collocated", False),
        ({"scheduler": "slackline", "deadlines": True}, "collocated", True),
        ({"scheduler": "slackline"}, "prefill", True),
        ({"scheduler": "slackline"}, "decode", False),
        ({"scheduler": "preemptive"}, "collocated", True),
    ],
)
def test_engines_that_choose_by_value_are_known_by_what_they_were_started_with(spec, role, selects):
    factories.instance(factories.served_model(), spec=spec, role=role)
    (instance,) = gateway_snapshot().instances
    assert instance.selects is selects


def test_one_that_becomes_ready_meanwhile_is_in_it():
    """Otherwise who waits for it would be told that nobody comes."""
    row = factories.instance(observed_state="starting", url="")
    asked: list[str] = []

    def becomes_ready(execute, query, params, many, context):
        asked.append(query)
        answer = execute(query, params, many, context)
        if len(asked) == 3:  # the version, the instances
            Instance.objects.filter(pk=row.pk).update(observed_state="ready", url="http://127.0.0.1:9")
        return answer

    with connection.execute_wrapper(becomes_ready):
        snapshot = gateway_snapshot()
    assert [each.id for each in (*snapshot.instances, *snapshot.coming)] == [row.pk]
    assert [each.id for each in gateway_snapshot().instances] == [row.pk]


@pytest.mark.parametrize("value", ["many", [1], -3, 0, 1.5, True])
def test_lengths_of_a_row_from_before_values_were_checked_are_not_told_to_gateways(value):
    model = factories.served_model(context_tokens=2048)
    factories.instance(model, spec={"kv_capacity_tokens": value, "max_model_len": value})
    (instance,) = gateway_snapshot().instances
    assert (instance.kv_capacity_tokens, instance.max_model_len) == (None, 2048)
