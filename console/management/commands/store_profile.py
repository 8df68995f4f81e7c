"""`manage.py store_profile FILE --model NAME`: make a profile measured by `python -m workers.profiler` the active one.

Gateways use it within a second for every instance of that model, device kind, tensor parallelism and role, and correct
it online. Earlier profiles are kept as history.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from controller.core.types import LatencyCoefficients
from controller.models import ServedModel
from controller.services.actors import SYSTEM
from controller.services.fleet.served_models import latency_profile_set


def _profile(file: str) -> tuple[LatencyCoefficients, dict[str, float], int]:
    """Coefficients, fit errors and samples. Raises CommandError naming the problem."""
    try:
        raw = json.loads(Path(file).read_text())
        coefficients = LatencyCoefficients(**{k: float(v) for k, v in raw["coefficients"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = ", ".join(LatencyCoefficients._fields)
        raise CommandError(f"{file}: {error!r}; must be JSON with `coefficients`: {wanted}") from error
    fit = dict(raw.get("fit") or {})
    samples = int(fit.pop("samples", 0))
    return coefficients, {k: float(v) for k, v in fit.items()}, samples


class Command(BaseCommand):
    """Recorded in the audit like any other change."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", help="JSON written by python -m workers.profiler --output")
        parser.add_argument("--model", required=True, help="name of the model")
        parser.add_argument("--device-kind", required=True, help="device kind of the instances")
        parser.add_argument("--tp", type=int, default=1, help="tensor parallelism")
        parser.add_argument("--role", default="collocated", choices=("collocated", "prefill", "decode"))

    def handle(self, *, file: str, model: str, device_kind: str, tp: int, role: str, **options: Any) -> None:
        served = ServedModel.objects.filter(name=model).first()
        if served is None:
            raise CommandError(f"model {model!r} does not exist")
        coefficients, errors, samples = _profile(file)
        try:
            latency_profile_set(
                actor=SYSTEM,
                model=served,
                device_kind=device_kind,
                coefficients=coefficients,
                tp=tp,
                role=role,
                fit_errors=errors,
                samples=samples,
                source=f"profiler: {Path(file).name}",
            )
        except ValidationError as error:
            raise CommandError("; ".join(error.messages)) from error
        self.stdout.write(f"Stored the profile of {model} ({device_kind}, tp {tp}, {role})")
