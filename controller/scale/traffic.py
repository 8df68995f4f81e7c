"""The traffic of models and of their stages, as the scaler sizes a fleet by it. Gateways count it and publish it, the
simulator counts it the same way.

Rates are requests per second over the last ten seconds. Where prefill and decode are disaggregated each stage has its
own: requests that prefill cannot accept are no demand for decode, and answers of collocated instances are no work of
either stage.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from controller.core.messages import ModelTraffic, StageTraffic
from controller.core.types import Role
from controller.scale.load import RATE_WINDOW_S

Waiting = tuple[int, float]  # how many, and the longest wait over its SLO
NO_TRAFFIC = ModelTraffic(
    arrival_rate=0.0, service_rate=0.0, queued=0, wait_over_slo=0.0, migrating=0, migrate_wait_over_slo=0.0
)


class RateMeter:
    """Events per second over the last ten seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def tick(self, now: float) -> None:
        self._times.append(now)
        self._forget(now)

    def rate(self, now: float) -> float:
        self._forget(now)
        return len(self._times) / RATE_WINDOW_S

    def _forget(self, now: float) -> None:
        while self._times and self._times[0] < now - RATE_WINDOW_S:
            self._times.popleft()


class ModelRates:
    """A RateMeter for each configured model."""

    def __init__(self) -> None:
        self._meters: dict[str, RateMeter] = {}

    def tick(self, model: str, now: float) -> None:
        self._meters.setdefault(model, RateMeter()).tick(now)

    def rates(self, now: float) -> dict[str, float]:
        """Requests/s by model; models without any are left out."""
        found = {model: meter.rate(now) for model, meter in self._meters.items()}
        return {model: rate for model, rate in found.items() if rate}


class StageRates:
    """What prefill and decode see of a model's traffic, each for itself: prompts sent to prefill instances and
    elsewhere, prompts prefilled, answers decoded."""

    def __init__(self) -> None:
        self._sent: defaultdict[bool, ModelRates] = defaultdict(ModelRates)  # to prefill instances, or elsewhere
        self._prefilled = ModelRates()
        self._decoded = ModelRates()

    def sent(self, model: str, now: float, *, prefill: bool) -> None:
        self._sent[prefill].tick(model, now)

    def prefilled(self, model: str, now: float) -> None:
        self._prefilled.tick(model, now)

    def decoded(self, model: str, now: float) -> None:
        self._decoded.tick(model, now)

    def traffic(
        self, now: float, arrived: Mapping[str, float], waiting: Mapping[str, Waiting], moving: Mapping[str, Waiting]
    ) -> dict[str, dict[str, StageTraffic]]:
        """By model with recent disaggregated requests, then by stage.

        Prefill gets the share of arrivals that it has of the sends; the rest goes to collocated instances. A prefilled
        request is an arrival for decode, whatever the model's arrivals do meanwhile.
        """
        there, elsewhere = self._sent[True].rates(now), self._sent[False].rates(now)
        prefilled, decoded = self._prefilled.rates(now), self._decoded.rates(now)
        found = {}
        for model in there.keys() | prefilled.keys() | decoded.keys() | moving.keys():
            sends = there.get(model, 0.0) + elsewhere.get(model, 0.0)
            share = there.get(model, 0.0) / sends if sends else 1.0
            found[model] = {
                "prefill": _stage(share * arrived.get(model, 0.0), prefilled, model, waiting),
                "decode": _stage(prefilled.get(model, 0.0), decoded, model, moving),
            }
        return found


def _stage(arrival_rate: float, finished: dict[str, float], model: str, waiting: Mapping[str, Waiting]) -> StageTraffic:
    queued, wait = waiting.get(model, (0, 0.0))
    return StageTraffic(
        arrival_rate=arrival_rate, service_rate=finished.get(model, 0.0), queued=queued, wait_over_slo=wait
    )


def model_traffic(
    now: float,
    arrived: Mapping[str, float],
    finished: Mapping[str, float],
    rates: StageRates,
    waiting: Mapping[str, Waiting],
    moving: Mapping[str, Waiting],
) -> dict[str, ModelTraffic]:
    """By model. `arrived`, `finished`: requests/s; `waiting`: in the queue; `moving`: for a decode instance."""
    stages = rates.traffic(now, arrived, waiting, moving)
    found = {
        model: ModelTraffic(
            arrival_rate=arrived.get(model, 0.0),
            service_rate=finished.get(model, 0.0),
            queued=waiting.get(model, (0, 0.0))[0],
            wait_over_slo=waiting.get(model, (0, 0.0))[1],
            migrating=moving.get(model, (0, 0.0))[0],
            migrate_wait_over_slo=moving.get(model, (0, 0.0))[1],
        )
        for model in sorted(arrived.keys() | finished.keys() | waiting.keys() | moving.keys() | stages.keys())
    }
    for model, by_stage in stages.items():
        found[model]["stages"] = by_stage
    return found


def stage_traffic(traffic: ModelTraffic, role: str) -> StageTraffic:
    """Prefilled requests wait for the decode stage, requests in the dispatcher's queue for any other. Without stages (a
    gateway of an older version, or nothing was prefilled lately) the rates are those of the model."""
    known = traffic.get("stages", {}).get(role)
    if known is not None:
        return known
    decodes = role == Role.DECODE
    return StageTraffic(
        arrival_rate=traffic["arrival_rate"],
        service_rate=traffic["service_rate"],
        queued=traffic["migrating"] if decodes else traffic["queued"],
        wait_over_slo=traffic["migrate_wait_over_slo"] if decodes else traffic["wait_over_slo"],
    )
