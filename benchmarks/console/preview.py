"""What an operator waits for who has an edit simulated before it is saved, on a database of a million records.

Two fleets: the demo's (its load for an hour, its two engines), and one of a hundred engines
(benchmarks/console/data.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from benchmarks.load.trials import note

HOUR_S = 3600.0
CHARS_PER_TOKEN = 4.0
ENGINES = 2


def previews() -> dict[str, dict[str, Any]]:
    """By fleet: requests simulated, requests of the hour, `preview_s` from asking to the stored result and `cpu_s` of
    it in this process, `error`."""
    found = {"100 engines": _preview("interactive")}
    _demo_hour()
    return found | {"demo": _preview("interactive")}


def _preview(name: str) -> dict[str, Any]:
    """Half the TTFT of a class, asked and carried out as the console and its worker do."""
    from django.conf import settings
    from django.utils import timezone

    from controller.models import Experiment, SLOClass
    from controller.selectors.experiments import previews
    from controller.selectors.experiments.edits import ClassEdit
    from controller.services.actors import Actor
    from controller.services.experiments.previews import preview_order
    from workers.experiments.runner import next_experiment

    row = SLOClass.objects.get(name=name, tenant=None)
    edit = ClassEdit(name, previews.class_owners(row), row.ttft_s / 2, row.tpot_s, row.deadline_s, row.waiting_time_s)
    began, busy = time.monotonic(), time.process_time()
    asked = preview_order(
        actor=Actor.person("benchmark"), name="Edit", edit=edit, policy=settings.DISPATCH_POLICY,
        overrides=settings.DISPATCH_OVERRIDES, now=timezone.now(),
    )  # fmt: skip
    next_experiment()
    wall, cpu = time.monotonic() - began, time.process_time() - busy
    done = Experiment.objects.get(pk=asked.pk)
    sample = done.result["sample"] if done.result else {"requests": 0, "of": 0}
    found = {
        "requests": sample["requests"],
        "of": sample["of"],
        "preview_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "error": done.error,
    }
    note(f"preview {found}")
    return found


def _demo_hour() -> None:
    """The demo's model, engines and classes, and an hour of its load on record, served as the simulator serves it.

    It becomes the busiest model of the hour: the others' roll-up of that hour is emptied.
    """
    from django.db import connection
    from django.utils import timezone

    from console.management import demo
    from controller.models import AttainmentMinute, GoodputMinute, Instance, LatencyProfile, ServedModel, SLOClass
    from controller.services.records.requests import records_write
    from controller.simulator.__main__ import read_profile, read_trace
    from controller.simulator.experiment import parse_experiment
    from controller.simulator.simulation import Simulation
    from workers.experiments.shipped_profiles import shipped_profile

    model = ServedModel.objects.create(name=demo.MODEL, context_tokens=8192)
    profile = shipped_profile(demo.PROFILE)
    LatencyProfile.objects.create(model=model, device_kind=demo.DEVICE_KIND, coefficients=profile)
    for number in range(ENGINES):
        Instance.objects.create(
            id=f"demo-{number}", model=model, backend="reference", provisioner="process", device_kind=demo.DEVICE_KIND,
            url=f"http://127.0.0.1:{9100 + number}", max_num_seqs=demo.ENGINE_SEQS,
            observed_state=Instance.Observed.READY,
        )  # fmt: skip
    for each in demo.CLASSES:
        SLOClass.objects.update_or_create(name=each["name"], tenant=None, defaults=each)
    spec = {
        "instances": [{"count": ENGINES, "profile": profile, "max_num_seqs": demo.ENGINE_SEQS, "model": demo.MODEL}],
        "workload": {"kind": "mix", "mix": "2-task", "per_task": 1, "rate": 1.0},
        "policies": ["slackline"],
    }
    one = parse_experiment(spec, read_profile, read_trace)
    demands = list(demands_of_an_hour())
    result = Simulation(one.contenders[0].settings(one.settings), one.contenders[0].build(), demands).run()
    start = time.time() - HOUR_S - 1.0
    sources = {demand.id: demand for demand in demands}
    with connection.cursor() as cursor:  # connects
        cursor.execute("SELECT 1")
    for model_of_minutes in (AttainmentMinute, GoodputMinute):
        model_of_minutes.objects.filter(minute__gte=timezone.now() - timedelta(minutes=62)).delete()
    records_write(connection=connection.connection, records=[_record(each, start, sources) for each in result.records])


def demands_of_an_hour() -> Iterator[Any]:
    """What `workers.demo_load` sends in an hour, seeded; targets as the demo's classes and mapping give them."""
    from console.management import demo
    from controller.core.types import Targets
    from controller.simulator.workloads.demand import Demand
    from workers.demo_load import KINDS, DemoPace, body, pick

    rng, pace, at, number = random.Random(1), DemoPace(1.0, 4.0, 15.0), 0.0, 0
    classes = {each["name"]: each for each in demo.CLASSES}
    defaults = {each.name: each.default_class for each in demo.TENANTS}
    top = demo.mapping_levels()[0]
    while (at := at + rng.expovariate(pace.rate(at))) < HOUR_S:
        kind = pick(KINDS, rng)
        _, sent = body(kind, demo.MODEL, rng)
        text = sent["prompt"] if "prompt" in sent else sent["messages"][0]["content"]
        name = sent.get("slo_class", defaults[kind.tenant])
        row, priority = classes[name], sent.get("priority")
        targets = Targets(
            sent.get("target_ttft", row["ttft_s"]), sent.get("target_tbt", row["tpot_s"]), None, row["waiting_time_s"]
        )
        if priority is not None:
            name, targets = f"priority-{priority}", Targets(top["ttft_s"], top["tpot_s"], None, 5.0)
        yield Demand(
            f"demo-{number}", at, max(1, round(len(text) / CHARS_PER_TOKEN)), sent["max_tokens"], targets,
            slo_class=name, tenant=kind.tenant, value=row["value"], may_defer=row.get("may_defer", False),
        )  # fmt: skip
        number += 1


def _record(done: Any, start: float, sources: dict[str, Any]) -> Any:
    from controller.core.types import RequestRecord

    source = "priority" if done.slo_class.startswith("priority-") else "class"
    return RequestRecord(
        id=f"req-{done.id}", arrived_at=start + done.at, tenant=done.tenant, slo_class=done.slo_class, model="demo",
        priority=0 if source == "priority" else None, instance=done.instance, outcome=done.outcome.value,
        error_code="", http_status=200, streamed=True, judged_by="tokens", prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens, target_ttft_s=done.targets.ttft_s, target_tpot_s=done.targets.tpot_s,
        target_deadline_s=None, waiting_time_s=done.targets.waiting_time_s, queue_s=done.queue_s, ttft_s=done.ttft_s,
        tpot_s=done.tpot_s, e2e_s=done.e2e_s, ttft_met=done.ttft_met, tpot_met=done.tpot_met,
        deadline_met=done.deadline_met, attained=done.attained, goodput_tokens=done.goodput_tokens,
        attempts=done.attempts, workflow="", stage="", decisions=[{"kind": "slo", "reason": source, "figures": {}}],
        token_times=[], may_defer=sources[done.id].may_defer,
    )  # fmt: skip
