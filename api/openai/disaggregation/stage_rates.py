"""What prefill and decode see of a model's traffic, apart: the scaler sizes each by its own."""

from __future__ import annotations

from collections import defaultdict

from api.openai.ledger import ModelRates
from controller.core.messages import StageTraffic

Waiting = tuple[int, float]  # how many, and the longest wait over its SLO


class StageRates:
    """Prompts sent to prefill instances and elsewhere, prefilled, and answers decoded, over the last ten seconds."""

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
        self, now: float, arrived: dict[str, float], waiting: dict[str, Waiting], moving: dict[str, Waiting]
    ) -> dict[str, dict[str, StageTraffic]]:
        """By model of which anything went through two stages lately, then by stage.

        Of arrivals those count for prefill that its share of the sends says; the others go to collocated instances.
        A prefilled request is an arrival for decode, whatever the model's arrivals do meanwhile.
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


def _stage(arrival_rate: float, finished: dict[str, float], model: str, waiting: dict[str, Waiting]) -> StageTraffic:
    queued, wait = waiting.get(model, (0, 0.0))
    return StageTraffic(
        arrival_rate=arrival_rate, service_rate=finished.get(model, 0.0), queued=queued, wait_over_slo=wait
    )
