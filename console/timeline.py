"""One finished request as bars against its deadlines. Seconds after arrival, shares 0..1 of the picture's width."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controller.models import RequestRecord


@dataclass(frozen=True, slots=True)
class Bar:
    """`kind` is the bar's style: queue, wait, bad, tick, due or none."""

    start: float
    share: float
    kind: str
    title: str


@dataclass(slots=True)
class Track:
    label: str
    value_s: float | None
    bars: list[Bar] = field(default_factory=list)
    note: str = ""


def timeline(row: RequestRecord) -> list[Track]:
    """Queue, first token, tokens and whole answer, each with the mark at which it was due."""
    whole = span_s(row)
    tracks = [_queue(row, whole), _first_token(row, whole)]
    if row.output_tokens > 1 and row.e2e_s is not None and row.ttft_s is not None:
        tracks.append(_tokens(row, whole))
    tracks.append(_answer(row, whole))
    return tracks


def span_s(row: RequestRecord) -> float:
    """The width of the picture: whatever is latest, measured or due."""
    times = (row.e2e_s, row.ttft_s, row.queue_s, row.target_ttft_s, row.target_deadline_s, _due_s(row))
    return max([value for value in times if value is not None] or [0.0]) * 1.03 or 1.0


def _due_s(row: RequestRecord) -> float:
    """The last token's due time: TTFT + (n - 1) x TPOT."""
    return row.target_ttft_s + max(0, row.output_tokens - 1) * row.target_tpot_s


def _bar(start_s: float, end_s: float, whole: float, kind: str, title: str) -> Bar:
    return Bar(start_s / whole, max(0.0, end_s - start_s) / whole, kind, title)


def _mark(at_s: float, whole: float, title: str, kind: str = "due") -> Bar:
    return Bar(at_s / whole, 0.0, kind, title)


def _queue(row: RequestRecord, whole: float) -> Track:
    track = Track("In the queue", row.queue_s)
    if row.queue_s is not None:
        track.bars.append(_bar(0.0, row.queue_s, whole, "queue", f"{row.queue_s:.3f} s in the gateway"))
    if row.waiting_time_s is not None and row.waiting_time_s <= whole:
        track.bars.append(_mark(row.waiting_time_s, whole, f"gives up after {row.waiting_time_s:g} s"))
    return track


def _first_token(row: RequestRecord, whole: float) -> Track:
    track = Track("First token", row.ttft_s, note="" if row.streamed else "not streamed: not seen")
    if row.ttft_s is not None:
        kind = "" if row.ttft_met else "bad"
        track.bars.append(_bar(row.queue_s or 0.0, row.ttft_s, whole, kind, f"first token after {row.ttft_s:.3f} s"))
    track.bars.append(_mark(row.target_ttft_s, whole, f"due after {row.target_ttft_s:g} s"))
    return track


def _tokens(row: RequestRecord, whole: float) -> Track:
    track = Track("Tokens", row.tpot_s, note="each, on average")
    kind = "" if row.tpot_met else "bad"
    track.bars.append(_bar(row.ttft_s or 0.0, row.e2e_s or 0.0, whole, kind, f"{row.output_tokens} tokens"))
    track.bars.extend(_mark(at, whole, f"token after {at:.3f} s", "tick") for at in _times(row.token_times))
    track.bars.append(_mark(_due_s(row), whole, f"last token due after {_due_s(row):.3f} s"))
    return track


def _times(summary: Any) -> list[float]:
    return [float(at) for at in summary if isinstance(at, int | float)]


def _answer(row: RequestRecord, whole: float) -> Track:
    track = Track("Whole answer", row.e2e_s)
    if row.e2e_s is not None:
        kind = "" if row.attained else "bad"
        track.bars.append(_bar(0.0, row.e2e_s, whole, kind, f"{row.e2e_s:.3f} s end to end"))
    if row.target_deadline_s is not None:
        track.bars.append(_mark(row.target_deadline_s, whole, f"deadline {row.target_deadline_s:g} s"))
    return track
