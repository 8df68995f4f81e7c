"""What an instance really took, beside what its fitted latency model says."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.types import LatencyCoefficients
from controller.models import Instance, LatencyProfile, RequestRecord
from controller.predict.latency import LatencyModel

POINTS = 300


@dataclass(frozen=True, slots=True)
class Measured:
    """One streamed request: prompt and output tokens, seconds from being sent to its first token, seconds a token."""

    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    tpot_s: float | None


def profile_of(instance: Instance) -> LatencyProfile | None:
    """The active fit for its model, kind of device, parallelism and role."""
    return LatencyProfile.objects.filter(
        model=instance.model_id, device_kind=instance.device_kind, tp=instance.tp, role=instance.role, active=True
    ).first()


def measurements(instance_id: str, limit: int = POINTS) -> list[Measured]:
    """Of its newest served requests, by the index on instance and time."""
    rows = RequestRecord.objects.filter(instance=instance_id, outcome="ok", ttft_s__isnull=False)
    values = rows.order_by("-arrived_at").values_list("prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s")
    return [Measured(p, n, max(0.0, ttft - (queue or 0.0)), tpot) for p, n, queue, ttft, tpot in values[:limit]]


def prefill_line(profile: LatencyProfile, lengths: list[int]) -> list[float]:
    """Seconds of one prompt alone on an idle engine."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.prefill([length]) for length in lengths]


def decode_line(profile: LatencyProfile, contexts: list[int], batch: int) -> list[float]:
    """Seconds a token in a batch of `batch` sequences of the same context."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.decode(batch, batch * context) for context in contexts]
