"""`manage.py seed_demo`: create demo tenants, classes, a model, instances and logins. Existing objects are kept."""

from __future__ import annotations

import json
import os
import secrets
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Group, User
from django.core.management.base import BaseCommand
from django.db import transaction

from console.management import demo
from controller.flow.gate import OFF
from controller.models import (
    ApiKey,
    FlowSettings,
    Host,
    Instance,
    LatencyProfile,
    PriorityMapping,
    ScalingPolicy,
    ServedModel,
    SLOClass,
    Tenant,
    Trace,
)
from controller.models.tenants import secret_digest
from controller.services.actors import SYSTEM
from controller.services.experiments.traces import trace_create
from controller.services.fleet.instances import instance_create
from controller.services.fleet.launch_templates import shipped_templates_store
from controller.services.fleet.scaling_policies import scaling_policy_create
from controller.services.fleet.served_models import latency_profile_set, served_model_create
from controller.services.fleet.topology import device_create, host_create
from controller.services.records.partitions import partitions_ensure
from controller.services.slo.api_keys import api_key_create, api_key_revoke
from controller.services.slo.flow_settings import flow_settings_create
from controller.services.slo.priority_mappings import priority_mapping_create
from controller.services.slo.slo_classes import slo_class_create
from controller.services.slo.tenants import tenant_create
from workers.engine.profiles import load_profile
from workers.environment import read_variable


class Command(BaseCommand):
    """Idempotent, so it runs at each start. Secrets go to DATA_DIR/credentials.json (mode 0600)."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--demo", action="store_true", help="give the tenant demo the fixed key from the documentation"
        )
        parser.add_argument(
            "--engines",
            type=int,
            default=2,
            choices=range(demo.DEVICES + 1),
            help="number of instances (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        path = Path(settings.DATA_DIR) / "credentials.json"
        credentials = _read(path)
        with transaction.atomic():
            partitions_ensure()
            shipped_templates_store()
            _classes()
            model = _model()
            _fleet(model, options["engines"])
            _trace()
            _flows()
            _keys(credentials, fixed=options["demo"])
            _people(credentials)
        _write(path, credentials)
        self.stdout.write(f"Demo data is ready. Logins and keys are in {path}.")


def _classes() -> None:
    for row in demo.CLASSES:
        if not SLOClass.objects.filter(tenant=None, name=row["name"]).exists():
            slo_class_create(actor=SYSTEM, **row)
    if not PriorityMapping.objects.filter(tenant=None).exists():
        priority_mapping_create(actor=SYSTEM, levels=demo.mapping_levels())
    for name, title, class_name, limits in demo.TENANTS:
        if not Tenant.objects.filter(name=name).exists():
            default = SLOClass.objects.get(tenant=None, name=class_name)
            tenant_create(actor=SYSTEM, name=name, title=title, default_class=default, **limits)


def _model() -> ServedModel:
    model = ServedModel.objects.filter(name=demo.MODEL).first()
    if model is None:
        model = served_model_create(actor=SYSTEM, name=demo.MODEL, context_tokens=8192)
    if not LatencyProfile.objects.filter(model=model, device_kind=demo.DEVICE_KIND, active=True).exists():
        speed = load_profile(demo.PROFILE).coefficients
        latency_profile_set(
            actor=SYSTEM, model=model, device_kind=demo.DEVICE_KIND, coefficients=speed, source=demo.PROFILE
        )
    if not ScalingPolicy.objects.filter(model=model).exists():
        # No warm spares: devices are emulated, and a small machine has no CPU to spare for idle processes.
        scaling_policy_create(actor=SYSTEM, model=model, min_instances=2, max_instances=4, warm=0)
    return model


def _fleet(model: ServedModel, engines: int) -> None:
    """Only for a model that never had instances: those that were stopped or failed are not replaced."""
    host = Host.objects.filter(name=demo.HOST).first() or host_create(actor=SYSTEM, name=demo.HOST, zone="default")
    if not host.devices.exists():
        for index in range(demo.DEVICES):
            device_create(
                actor=SYSTEM, host=host, index=index, kind=demo.DEVICE_KIND, memory_bytes=demo.DEVICE_MEMORY_BYTES
            )
    if Instance.objects.filter(model=model).exists():
        return
    for number, device in zip(range(1, engines + 1), host.devices.order_by("index"), strict=False):
        instance_create(
            actor=SYSTEM,
            id=f"engine-{number}",
            model=model,
            host=host,
            devices=[device],
            device_kind=demo.DEVICE_KIND,
            max_num_seqs=demo.ENGINE_SEQS,
            spec={"profile": demo.PROFILE, "seed": number},
        )


def _trace() -> None:
    """A trace for experiments: the sample that ships with the simulator."""
    if not Trace.objects.exists():
        trace_create(actor=SYSTEM, name=demo.TRACE_NAME, content=demo.TRACE.read_bytes())


def _flows() -> None:
    """FLOW_POLICY is the first value; from then on the stored one decides."""
    if not FlowSettings.objects.exists():
        flow_settings_create(actor=SYSTEM, flow_policy=read_variable(os.environ, "FLOW_POLICY") or OFF)


def _keys(credentials: dict[str, Any], *, fixed: bool) -> None:
    """One key per tenant with a known secret. A key whose secret is lost is revoked and replaced."""
    known = credentials.setdefault("keys", {})
    for name, *_ in demo.TENANTS:
        tenant = Tenant.objects.get(name=name)
        wanted = demo.DEMO_SECRET if fixed and name == "demo" else known.get(name)
        live = ApiKey.objects.filter(tenant=tenant, name="demo", revoked_at=None)
        if wanted and live.filter(sha256=secret_digest(wanted)).exists():
            known[name] = wanted
            continue
        for lost in live:
            api_key_revoke(actor=SYSTEM, key_id=lost.pk)
        known[name] = _new_key(tenant, wanted)
    credentials |= {"model": demo.MODEL, "api_key": known["demo"]}


def _new_key(tenant: Tenant, wanted: str | None) -> str:
    """With the wanted secret, unless a key with it was revoked: then a new key with another secret is created."""
    if wanted and ApiKey.objects.filter(sha256=secret_digest(wanted)).exists():
        wanted = None
    return api_key_create(actor=SYSTEM, tenant=tenant, name="demo", secret=wanted).secret


def _people(credentials: dict[str, Any]) -> None:
    for name in demo.PEOPLE:
        person, created = User.objects.get_or_create(
            username=name, defaults={"is_staff": name == "admin", "is_superuser": name == "admin"}
        )
        if created or f"{name}_password" not in credentials:
            credentials |= {name: name, f"{name}_password": secrets.token_urlsafe(9)}
            person.set_password(credentials[f"{name}_password"])
            person.save(update_fields=["password"])
        person.groups.add(Group.objects.get_or_create(name=name)[0])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(path: Path, credentials: dict[str, Any]) -> None:
    """Written atomically, and never readable by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(credentials, file, indent=1)
    partial.replace(path)
