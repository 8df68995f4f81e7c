"""Measured latencies of an instance, to compare with its fitted latency model."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import FloatField, Func, Value
from django.db.models.functions import Cast

from controller.core.types import LatencyCoefficients
from controller.models import Instance, LatencyProfile, RequestRecord
from controller.predict.latency import LatencyModel
from controller.selectors.fleet.latency_fits import active_fits

POINTS = 300
COLUMNS = ("prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "prefill_instance", "prefilled_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """One request as a measurement of an engine: its tokens, seconds from sending it to the end of its prefill, and
    seconds per token. None: another engine did that part, or it was not measured."""

    prompt_tokens: int
    output_tokens: int
    prefill_s: float | None
    tpot_s: float | None


class _PrefilledAt(Func):
    """The end of the last prefill on an instance of that role, in seconds after arrival, as text."""

    template = """(jsonb_path_query_array(%(expressions)s, '$[*] ? (@.kind == "prefill").at') ->> -1)"""


def profile_of(instance: Instance) -> LatencyProfile | None:
    """The active fit for its model, device kind, parallelism and role, or the collocated one."""
    return active_fits([instance.model_id]).of(instance)


def measurements(instance_id: str, limit: int = POINTS) -> list[Measured]:
    """Measurements from its newest served requests, by the indexes on either instance and time. One query.

    If two engines shared a request, each is measured on its own part; the first token includes the KV transfer, so it
    counts for neither. A disaggregated prefill is measured for answers in one piece too, since its instance reports its
    end.
    """
    served = RequestRecord.objects.filter(outcome="ok").order_by("-arrived_at")
    answered = served.filter(instance=instance_id, ttft_s__isnull=False)
    seen = answered.annotate(prefilled_s=Value(None, FloatField())).values_list(*COLUMNS)[:limit]
    prefilled = served.filter(prefill_instance=instance_id).exclude(prefill_instance="")
    staged = prefilled.annotate(prefilled_s=Cast(_PrefilledAt("decisions"), FloatField())).values_list(*COLUMNS)[:limit]
    rows = seen.union(staged, all=True)
    return [point for point in (_point(instance_id, *row) for row in rows) if point is not None]


def _point(
    instance_id: str,
    prompt: int,
    output: int,
    queue_s: float | None,
    ttft_s: float | None,
    tpot_s: float | None,
    prefiller: str,
    prefilled_s: float | None,
) -> Measured | None:
    sent = queue_s or 0.0
    if prefiller == instance_id:
        return None if prefilled_s is None else Measured(prompt, output, max(0.0, prefilled_s - sent), None)
    whole = not prefiller and ttft_s is not None
    return Measured(prompt, output, max(0.0, (ttft_s or 0.0) - sent) if whole else None, tpot_s)


def prefill_line(profile: LatencyProfile, lengths: list[int]) -> list[float]:
    """Seconds for one prompt alone on an idle engine."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.prefill([length]) for length in lengths]


def decode_line(profile: LatencyProfile, contexts: list[int], batch: int) -> list[float]:
    """Seconds per token in a batch of `batch` sequences with the same context length."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.decode(batch, batch * context) for context in contexts]
