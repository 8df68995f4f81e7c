"""One finished request as it is stored. The order of FIELDS is the order of the COPY columns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from controller.core.types import Outcome

ENGINE_REJECTED = "engine_rejected"  # error code of a request whose content the engine refused (its 4xx)


@dataclass(slots=True)
class RequestRecord:
    """Wall times are epoch seconds, durations seconds. `decisions` is compact: kind, reason and figures per step."""

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
    token_times: list[float]  # summary: seconds after arrival of the 1st, 2nd, 4th, 8th ... and last token
    prefill_instance: str = ""  # where its KV was computed, if `instance` only decoded it
    may_defer: bool = False  # its class has it served late rather than refused

    @property
    def counted_as(self) -> str:
        """The outcome that windows and roll-up count: what an engine rejects is no more a miss than a hang-up is."""
        return Outcome.CANCELLED.value if self.error_code == ENGINE_REJECTED else self.outcome


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(RequestRecord))


def record_as_dict(record: RequestRecord) -> dict[str, Any]:
    return asdict(record)
