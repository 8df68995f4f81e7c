"""Fills a benchmark's database from JSON on standard input, and prints the new API key as JSON.

benchmarks/servers/stack.py runs it in a separate process, so that the load generator needs no Django.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Of the tenant under test; a second one ("other") has half of the queue, as new tenants do, and a third
# ("limited") one request a minute.
UNBOUNDED: dict[str, Any] = {"rpm": None, "tpm": None, "max_concurrency": None, "queue_share": 1.0}


def seed(fleet: dict[str, Any]) -> dict[str, str]:
    """One tenant with a key, classes for all, a model with its latency profile, and the engines as static instances."""
    from controller.core.types import LatencyCoefficients
    from controller.services.actors import Actor
    from controller.services.fleet import instances, served_models
    from controller.services.slo import api_keys, flow_settings, slo_classes, tenants

    actor = Actor.job("benchmark")
    model = served_models.served_model_create(actor=actor, name=fleet["model"], context_tokens=fleet["context_tokens"])
    for slo_class in fleet["classes"]:
        slo_classes.slo_class_create(actor=actor, **{name: v for name, v in slo_class.items() if v is not None})
    if fleet["drop_budget"]:
        flow_settings.flow_settings_create(actor=actor, drop_budget=fleet["drop_budget"])
    tenant = tenants.tenant_create(actor=actor, name=fleet["tenant"], retention_s=fleet["retention_s"], **UNBOUNDED)
    other = tenants.tenant_create(actor=actor, name="other", **{**UNBOUNDED, "queue_share": 0.5})
    limited = tenants.tenant_create(actor=actor, name="limited", **{**UNBOUNDED, "rpm": 1})
    spec: dict[str, Any] = {"max_model_len": fleet["context_tokens"], **fleet["started"]}
    if fleet["kv_capacity_tokens"]:
        spec["kv_capacity_tokens"] = fleet["kv_capacity_tokens"]
    latencies = fleet["by_device"] or ({"cpu": fleet["coefficients"]} if fleet["coefficients"] else {})
    for device_kind, coefficients in latencies.items():
        served_models.latency_profile_set(
            actor=actor, model=model, device_kind=device_kind, coefficients=LatencyCoefficients(**coefficients)
        )
    roles = fleet["roles"] or ["collocated"] * len(fleet["urls"])
    devices = fleet["devices"] or ["cpu"] * len(fleet["urls"])
    for index, (url, role, device_kind) in enumerate(zip(fleet["urls"], roles, devices, strict=True)):
        row = instances.instance_register(
            actor=actor,
            id=f"engine-{index}",
            model=model,
            url=url,
            backend=fleet["backend"],
            role=role,
            device_kind=device_kind,
            max_num_seqs=fleet["max_num_seqs"],
            spec=spec,
        )
        instances.instance_observe(instance_id=row.id, observed_state="ready")
    made = {"api_key": tenant, "other_api_key": other, "limited_api_key": limited}
    return {
        name: api_keys.api_key_create(actor=actor, tenant=each, name="benchmark").secret for name, each in made.items()
    }


def main() -> None:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    django.setup()
    print(json.dumps(seed(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
