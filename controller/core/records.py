"""One finished request as it is stored. FIELDS is in the order of the COPY columns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from controller.core.types import Outcome

ENGINE_REJECTED = "engine_rejected"  # error code of a request that the engine refused with a 4xx


@dataclass(slots=True)
class RequestRecord:
    """All about one request. Times of day are epoch seconds, durations seconds.

    `decisions` is compact: kind, reason and figures of each step.
    """

    id: str  # x-slackline-request-id, unique
    arrived_at: float
    tenant: str
    slo_class: str
    model: str
    priority: int | None
    instance: str
    outcome: str  # types.Outcome
    error_code: str
    http_status: int
    streamed: bool
    judged_by: str  # "tokens" (streamed) or "e2e" (non-streamed, TTFT + (n-1) x TPOT)
    prompt_tokens: int
    output_tokens: int
    target_ttft_s: float
    target_tpot_s: float
    target_deadline_s: float | None
    waiting_time_s: float | None
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    ttft_met: bool
    tpot_met: bool
    deadline_met: bool
    attained: bool
    goodput_tokens: int
    attempts: int
    workflow: str
    stage: str
    decisions: list[dict[str, Any]]
    token_times: list[float]  # seconds after arrival of the 1st, 2nd, 4th, 8th ... and last token
    prefill_instance: str = ""  # prefill instance, if `instance` only decoded it
    may_defer: bool = False  # its class serves it late instead of refusing it

    @property
    def counted_as(self) -> str:
        """The outcome for windows and roll-ups.

        A request that the engine refused counts like a cancelled one: it is no miss.
        """
        return Outcome.CANCELLED.value if self.error_code == ENGINE_REJECTED else self.outcome


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(RequestRecord))


def record_as_dict(record: RequestRecord) -> dict[str, Any]:
    return asdict(record)
