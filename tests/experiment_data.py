"""What experiments are made of in tests: recorded traffic, a fleet, small specs."""

from __future__ import annotations

import time
from typing import Any

from django.db import connection

from controller.models import Experiment, LatencyProfile
from controller.services.actors import Actor
from controller.services.experiments.commands import experiment_create
from controller.services.records.requests import records_write
from tests import factories

OLGA = Actor.person("olga")
SPEED = {
    "prefill_a": 0.0097, "prefill_b": 0.00026, "prefill_c": 1e-7, "decode_a": 0.0068, "decode_b": 1.3e-6,
    "decode_c": 0.00035,
}  # fmt: skip
INSTANCES = [{"count": 2, "profile": SPEED, "max_num_seqs": 16, "max_model_len": 4096}]
MIX = {"kind": "mix", "mix": "4-task", "per_task": 10, "rate": 20.0}


def spec(**changes: Any) -> dict[str, Any]:
    """Forty requests on two instances under two policy sets."""
    return {"instances": INSTANCES, "workload": MIX, "policies": ["slackline", "round_robin"], **changes}


def no_profile(name: str) -> Any:
    from controller.core.errors import ConfigError

    raise ConfigError(f"unknown profile {name!r}", field="profile")


def experiment(name: str = "two policies", **changes: Any) -> Experiment:
    return experiment_create(actor=OLGA, name=name, spec=spec(**changes), read_profile=no_profile)


def traffic(count: int, *, ending: float | None = None, every_s: float = 0.2, **fields: Any) -> list[str]:
    """`count` records of model demo, the last one at `ending` (epoch seconds, now); stored with their roll-up."""
    last = time.time() - 5 if ending is None else ending
    rows = [
        factories.record(
            **{
                "arrived_at": last - (count - 1 - number) * every_s,
                "decisions": [{"kind": "slo", "reason": "class", "figures": {}}],
                **{name: value(number) if callable(value) else value for name, value in fields.items()},
            }
        )
        for number in range(count)
    ]
    with connection.cursor() as cursor:  # connects
        cursor.execute("SELECT 1")
    records_write(connection=connection.connection, records=rows)
    return [row.id for row in rows]


def fleet(instances: int = 2, model: str = "demo") -> Any:
    """Ready instances of one model with a fitted latency."""
    served = factories.served_model(name=model, context_tokens=4096)
    LatencyProfile.objects.create(model=served, device_kind="a100", coefficients=SPEED)
    for _ in range(instances):
        factories.instance(served, device_kind="a100", max_num_seqs=16)
    return served
