"""What every ended request leaves behind: a verdict, a record, learned lengths, quota given back, counters."""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

from api.openai.in_flight import InFlightRequest
from api.openai.quotas import Quotas
from api.openai.state.instruments import Instruments
from controller.core.snapshot import ModelConfig
from controller.core.types import Outcome, Outlook, RequestRecord
from controller.predict.lengths import OutputLengthModel, PromptEstimates
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
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None:
        """Exactly once for each request that was let in."""
        self._quotas.release(in_flight.request.tenant, in_flight.charged_tokens, _tokens(in_flight))
        self.note(in_flight, outcome, now, code=code, status=status)

    def note(
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None:
        """The same for one refused by its quota, which was never let in."""
        record, cause = _record(in_flight, outcome, now, code, status)
        if outcome is Outcome.OK:
            self.finished.tick(in_flight.request.model, now)
            self._learn(in_flight, record, now)
        elif outcome in (Outcome.REFUSED, Outcome.EXPIRED):
            self.refusals[record.tenant, record.slo_class, code] += 1
        self.windows.observe(record, cause, now)
        self._instruments.ended(record)
        self._sink.add(record)

    def _learn(self, in_flight: InFlightRequest, record: RequestRecord, now: float) -> None:
        request = in_flight.request
        self.lengths.observe(request.tenant, request.slo_class, request.model, record.output_tokens)
        model = self.models.get(request.model)
        if in_flight.text.chars and in_flight.usage is not None and model is not None:
            self.estimates.observe(model, in_flight.text, request.prompt_tokens, in_flight.usage.prompt_tokens)
        if request.level is not None:
            queue_s = record.queue_s or 0.0
            self.book.observe(request.tenant, request.level, record.ttft_s, record.tpot_s, queue_s, now)


def _tokens(in_flight: InFlightRequest) -> int:
    prompt = in_flight.usage.prompt_tokens if in_flight.usage else in_flight.request.prompt_tokens
    return prompt + in_flight.output_tokens if in_flight.sends else 0


def _record(
    in_flight: InFlightRequest, outcome: Outcome, now: float, code: str, status: int
) -> tuple[RequestRecord, str]:
    request = in_flight.request
    e2e_s = now - request.arrival
    prompt_tokens = in_flight.usage.prompt_tokens if in_flight.usage else request.prompt_tokens
    times = [at - request.arrival for at in in_flight.times] if in_flight.times is not None else None
    ttft_s = times[0] if times else None
    n = in_flight.output_tokens
    tpot_s = (times[-1] - times[0]) / (n - 1) if times and n > 1 else None
    streamed_times = (times or []) if in_flight.streamed else None
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
    queue_s = in_flight.sent_at - request.arrival if in_flight.sent_at is not None else None
    targets = request.targets
    record = RequestRecord(
        id=request.id,
        arrived_at=in_flight.arrived_wall,
        tenant=request.tenant,
        slo_class=request.slo_class,
        model=request.model,
        priority=request.priority,
        instance=in_flight.instance,
        outcome=outcome.value,
        error_code=code,
        http_status=status,
        streamed=in_flight.streamed,
        judged_by="tokens" if in_flight.streamed else "e2e",
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
        attempts=in_flight.sends,
        workflow=request.workflow,
        stage=request.stage,
        decisions=in_flight.decisions or [],
        token_times=summary(times) if times else [],
        prefill_instance=in_flight.prefill_instance,
        may_defer=request.may_defer,
    )
    return record, _cause(in_flight, outcome, outlook, code, queue_s)


def summary(times: list[float]) -> list[float]:
    """The 1st, 2nd, 4th, 8th ... and last time, in microseconds' precision."""
    kept, index = [], 1
    while index < len(times):
        kept.append(round(times[index - 1], 6))
        index *= 2
    return [*kept, round(times[-1], 6)]


def _cause(in_flight: InFlightRequest, outcome: Outcome, outlook: Outlook, code: str, queue_s: float | None) -> str:
    """Why it is a miss, in one short code; "" when attained or cancelled by its client."""
    if outlook.attained or outcome is Outcome.CANCELLED:
        return ""
    if outcome is Outcome.CUT:
        return code if code == "shutting_down" else "engine_cut"
    if outcome is not Outcome.OK:
        return _decided(in_flight) or code or outcome.value
    if not in_flight.streamed and not outlook.ttft_met:
        return "e2e_missed"
    if not outlook.ttft_met:
        waited_most = (queue_s or 0.0) > in_flight.request.targets.ttft_s / 2
        return "queued_too_long" if waited_most else "slow_first_token"
    return "slow_decode" if not outlook.tpot_met else "deadline_missed"


def _decided(in_flight: InFlightRequest) -> str:
    """What the decision that ended it says, which is more than the code its client got; "" if none ended it."""
    if not in_flight.decisions:
        return ""
    last = in_flight.decisions[-1]
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
