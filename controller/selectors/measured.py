"""What an instance really took, beside what its fitted latency model says."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import FloatField, Func
from django.db.models.functions import Cast

from controller.core.types import LatencyCoefficients
from controller.models import Instance, LatencyProfile, RequestRecord
from controller.predict.latency import LatencyModel
from controller.selectors.latency_fits import active_fits

POINTS = 300


@dataclass(frozen=True, slots=True)
class Measured:
    """What one request says of an engine: its tokens, seconds from being sent there to the end of its prefill, seconds
    a token. None: another engine's part, or not seen."""

    prompt_tokens: int
    output_tokens: int
    prefill_s: float | None
    tpot_s: float | None


class _PrefilledAt(Func):
    """When the last prefill on an instance of that role had ended, as text: seconds after arrival."""

    template = """(jsonb_path_query_array(%(expressions)s, '$[*] ? (@.kind == "prefill").at') ->> -1)"""


def profile_of(instance: Instance) -> LatencyProfile | None:
    """The active fit for its model, kind of device, parallelism and role, or the collocated one."""
    return active_fits([instance.model_id]).of(instance)


def measurements(instance_id: str, limit: int = POINTS) -> list[Measured]:
    """Of its newest served requests, by the indexes on either instance and time: two queries.

    Where two engines shared a request, prefill is the one's and decode the other's: the first token's time holds the
    KV cache's way and belongs to neither.
    """
    return [*_answered(instance_id, limit), *_prefilled(instance_id, limit)]


def _answered(instance_id: str, limit: int) -> list[Measured]:
    rows = RequestRecord.objects.filter(instance=instance_id, outcome="ok", ttft_s__isnull=False)
    values = rows.order_by("-arrived_at").values_list(
        "prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "prefill_instance"
    )
    return [
        Measured(prompt, output, None if elsewhere else max(0.0, ttft - (queue or 0.0)), tpot)
        for prompt, output, queue, ttft, tpot, elsewhere in values[:limit]
    ]


def _prefilled(instance_id: str, limit: int) -> list[Measured]:
    """Also of answers in one piece: the prefill instance has said when it was through."""
    rows = RequestRecord.objects.filter(prefill_instance=instance_id, outcome="ok").exclude(prefill_instance="")
    ended = rows.annotate(prefilled_s=Cast(_PrefilledAt("decisions"), FloatField())).order_by("-arrived_at")
    values = ended.values_list("prompt_tokens", "output_tokens", "queue_s", "prefilled_s")
    return [
        Measured(prompt, output, max(0.0, at - (queue or 0.0)), None)
        for prompt, output, queue, at in values[:limit]
        if at is not None
    ]


def prefill_line(profile: LatencyProfile, lengths: list[int]) -> list[float]:
    """Seconds of one prompt alone on an idle engine."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.prefill([length]) for length in lengths]


def decode_line(profile: LatencyProfile, contexts: list[int], batch: int) -> list[float]:
    """Seconds a token in a batch of `batch` sequences of the same context."""
    model = LatencyModel(LatencyCoefficients(**profile.coefficients))
    return [model.decode(batch, batch * context) for context in contexts]
