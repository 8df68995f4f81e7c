"""What every ended request leaves behind: a verdict, a record, learned lengths, quota given back, counters."""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

from api.openai.estimates import PromptEstimates
from api.openai.in_flight import InFlightRequest
from api.openai.quotas import Quotas
from api.openai.state.instruments import Instruments
from controller.core.records import RequestRecord
from controller.core.snapshot import ModelConfig
from controller.core.types import Outcome, Outlook
from controller.predict.output_length import OutputLengthModel
from controller.slo.attainment import AttainmentWindows, judge
from controller.slo.classes import ClassBook

RATE_WINDOW_S = 10.0


class RecordSink(Protocol):
    def add(self, record: RequestRecord) -> None: ...


class RateMeter:
    """Events per second over the last ten."""

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
    """A RateMeter for each model; those of the configuration are few."""

    def __init__(self) -> None:
        self._meters: dict[str, RateMeter] = {}

    def tick(self, model: str, now: float) -> None:
        self._meters.setdefault(model, RateMeter()).tick(now)

    def rates(self, now: float) -> dict[str, float]:
        """Requests/s by model, of models with any."""
        found = {model: meter.rate(now) for model, meter in self._meters.items()}
        return {model: rate for model, rate in found.items() if rate}


class Ledger:
    """`book` and `models` are replaced when the configuration changes."""

    def __init__(self, sink: RecordSink, quotas: Quotas, instruments: Instruments) -> None:
        self.windows = AttainmentWindows()
        self.lengths = OutputLengthModel()
        self.estimates = PromptEstimates()
        self.book = ClassBook((), ())
        self.models: dict[str, ModelConfig] = {}
        self.finished = ModelRates()
        self.refusals: Counter[tuple[str, str, str]] = Counter()  # (tenant, class, code) since the last decision
        self._sink = sink
        self._quotas = quotas
        self._instruments = instruments

    def ended(
        self, flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None:
        """Exactly once for each request that was let in."""
        self._quotas.release(flight.request.tenant, flight.charged_tokens, _tokens(flight))
        self.note(flight, outcome, now, code=code, status=status)

    def note(self, flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200) -> None:
        """The same for one refused by its quota, which was never let in."""
        record, cause = _record(flight, outcome, now, code, status)
        if outcome is Outcome.OK:
            self.finished.tick(flight.request.model, now)
            self._learn(flight, record, now)
        elif outcome in (Outcome.REFUSED, Outcome.EXPIRED):
            self.refusals[record.tenant, record.slo_class, code] += 1
        self.windows.observe(record, cause, now)
        self._instruments.ended(record)
        self._sink.add(record)

    def _learn(self, flight: InFlightRequest, record: RequestRecord, now: float) -> None:
        request = flight.request
        self.lengths.observe(request.tenant, request.slo_class, request.model, record.output_tokens)
        model = self.models.get(request.model)
        if flight.text.chars and flight.usage is not None and model is not None:
            self.estimates.observe(model, flight.text, request.prompt_tokens, flight.usage.prompt_tokens)
        if request.level is not None:
            queue_s = record.queue_s or 0.0
            self.book.observe(request.tenant, request.level, record.ttft_s, record.tpot_s, queue_s, now)


def _tokens(flight: InFlightRequest) -> int:
    prompt = flight.usage.prompt_tokens if flight.usage else flight.request.prompt_tokens
    return prompt + flight.output_tokens if flight.sends else 0


def _record(flight: InFlightRequest, outcome: Outcome, now: float, code: str, status: int) -> tuple[RequestRecord, str]:
    request = flight.request
    e2e_s = now - request.arrival
    prompt_tokens = flight.usage.prompt_tokens if flight.usage else request.prompt_tokens
    times = [at - request.arrival for at in flight.times] if flight.times is not None else None
    ttft_s = times[0] if times else None
    n = flight.output_tokens
    tpot_s = (times[-1] - times[0]) / (n - 1) if times and n > 1 else None
    streamed_times = (times or []) if flight.streamed else None
    outlook = judge(
        request.targets,
        outcome,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        prompt_tokens=prompt_tokens,
        output_tokens=n,
        token_times=streamed_times,
    )
    queue_s = flight.sent_at - request.arrival if flight.sent_at is not None else None
    targets = request.targets
    record = RequestRecord(
        id=request.id,
        arrived_at=flight.arrived_wall,
        tenant=request.tenant,
        slo_class=request.slo_class,
        model=request.model,
        priority=request.priority,
        instance=flight.instance,
        outcome=outcome.value,
        error_code=code,
        http_status=status,
        streamed=flight.streamed,
        judged_by="tokens" if flight.streamed else "e2e",
        prompt_tokens=prompt_tokens,
        output_tokens=n,
        target_ttft_s=targets.ttft_s,
        target_tpot_s=targets.tpot_s,
        target_deadline_s=targets.deadline_s,
        waiting_time_s=targets.waiting_time_s,
        queue_s=queue_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        ttft_met=outlook.ttft_met,
        tpot_met=outlook.tpot_met,
        deadline_met=outlook.deadline_met,
        attained=outlook.attained,
        goodput_tokens=outlook.goodput_tokens,
        attempts=flight.sends,
        workflow=request.workflow,
        stage=request.stage,
        decisions=flight.decisions or [],
        token_times=summary(times) if times else [],
        prefill_instance=flight.prefill_instance,
        may_defer=request.may_defer,
    )
    return record, _cause(flight, outcome, outlook, code, queue_s)


def summary(times: list[float]) -> list[float]:
    """The 1st, 2nd, 4th, 8th ... and last time, in microseconds' precision."""
    kept, index = [], 1
    while index < len(times):
        kept.append(round(times[index - 1], 6))
        index *= 2
    return [*kept, round(times[-1], 6)]


def _cause(flight: InFlightRequest, outcome: Outcome, outlook: Outlook, code: str, queue_s: float | None) -> str:
    """Why it is a miss, in one short code; "" when attained or cancelled by its client."""
    if outlook.attained or outcome is Outcome.CANCELLED:
        return ""
    if outcome is Outcome.CUT:
        return code if code == "shutting_down" else "engine_cut"
    if outcome is not Outcome.OK:
        return _decided(flight) or code or outcome.value
    if not flight.streamed and not outlook.ttft_met:
        return "e2e_missed"
    if not outlook.ttft_met:
        waited_most = (queue_s or 0.0) > flight.request.targets.ttft_s / 2
        return "queued_too_long" if waited_most else "slow_first_token"
    return "slow_decode" if not outlook.tpot_met else "deadline_missed"


def _decided(flight: InFlightRequest) -> str:
    """What the decision that ended it says, which is more than the code its client got; "" if none ended it."""
    if not flight.decisions:
        return ""
    last = flight.decisions[-1]
    if last["kind"] not in ("refuse", "expire", "cancel"):
        return ""
    figures = last["figures"]
    if last["reason"] == "waiting_time":
        if figures.get("paused"):
            return "expired_paused"
        if figures.get("instances") == 0:
            return "expired_without_instance"
        if figures.get("hopeless"):
            return "expired_hopeless"
    return str(last["reason"])
