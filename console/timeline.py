"""One finished request as a waterfall against its deadlines. Seconds after arrival, shares 0..1 of the width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.models import RequestRecord

ROOM = 1.03  # so that the last mark is not on the edge
TICKS = 6  # at most
FARTHEST = 3.0  # times what was measured: loose targets must not squeeze it into a sliver


@dataclass(frozen=True, slots=True)
class Bar:
    """`kind` is the bar's style: queue, engine, bad, tick, late, due, decision or none."""

    start: float
    share: float
    kind: str
    title: str


@dataclass(slots=True)
class Track:
    """One line of the picture; `note` says what its figure does not."""

    label: str
    value_s: float | None
    bars: list[Bar] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """`axis`: where a labelled line stands, and its label."""

    tracks: list[Track]
    axis: list[tuple[float, str]]


def timeline(row: RequestRecord, whole_s: float | None = None) -> Timeline:
    """`whole_s`: the width of the picture, to put two requests on one scale; without it the request's own span."""
    whole = whole_s or span_s(row)
    tracks = [_decisions(row, whole), _queue(row, whole)]
    if row.queue_s is not None and row.e2e_s is not None:
        tracks += _stages(row, whole) if row.ttft_s is not None else [_engine(row, whole)]
    tracks.append(_answer(row, whole))
    return Timeline([track for track in tracks if track], axis(whole))


def span_s(row: RequestRecord) -> float:
    """The width of the picture: whatever is latest, measured or due; a due time far beyond is told, not drawn."""
    measured = (row.e2e_s, row.ttft_s, row.queue_s)
    due = (row.target_ttft_s, row.target_deadline_s, due_s(row, row.output_tokens))
    latest = max([value for value in (*measured, *due) if value is not None] or [0.0])
    happened = max([value for value in measured if value is not None] or [0.0])
    return min(latest, FARTHEST * max(happened, row.target_ttft_s) or latest) * ROOM or 1.0


def due_s(row: RequestRecord, token: int) -> float:
    """When token number `token` (from 1) was due: TTFT + (token - 1) x TPOT."""
    return row.target_ttft_s + max(0, token - 1) * row.target_tpot_s


def token_numbers(kept: int, tokens: int) -> list[int]:
    """Which tokens the record's times belong to: the 1st, 2nd, 4th, 8th ... and the last."""
    return [*(2**index for index in range(kept - 1)), tokens] if kept else []


def axis(whole: float) -> list[tuple[float, str]]:
    """Round times, at most TICKS of them, from zero."""
    rough = whole / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [(index * step / whole, f"{index * step:g} s") for index in range(int(whole / step) + 1)]


def _bar(start_s: float, end_s: float, whole: float, kind: str, title: str) -> Bar:
    return Bar(start_s / whole, max(0.0, end_s - start_s) / whole, kind, title)


def _mark(at_s: float, whole: float, title: str, kind: str = "due") -> Bar:
    return Bar(at_s / whole, 0.0, kind, title)


def _due(track: Track, at_s: float, whole: float, what: str) -> None:
    """An upright mark, or a note where it lies beyond the picture."""
    if at_s <= whole:
        track.bars.append(_mark(at_s, whole, f"{what} after {at_s:.4g} s"))
    else:
        track.note = "; ".join(part for part in (track.note, f"{what} after {at_s:.4g} s") if part)


def _decisions(row: RequestRecord, whole: float) -> Track | None:
    """When each recorded step was taken, by its number in the list below the picture."""
    bars = [
        _mark(at, whole, f"{number} {step.get('kind', '')} after {at:.3f} s", "decision")
        for number, step in enumerate(row.decisions, 1)
        if isinstance(at := step.get("at"), int | float)
    ]
    return Track("Decisions", None, bars, note=f"{len(bars)} recorded") if bars else None


def _queue(row: RequestRecord, whole: float) -> Track:
    waited = row.queue_s if row.queue_s is not None else row.e2e_s
    track = Track("Queue", waited, note="" if row.queue_s is not None else "never sent")
    if waited is not None:
        kind = "queue" if row.queue_s is not None else "bad"
        track.bars.append(_bar(0.0, waited, whole, kind, f"{waited:.3f} s in the gateway's queue"))
    if row.queue_s is None:  # no other line could say it
        _due(track, row.target_ttft_s, whole, "first token due")
    if row.waiting_time_s is not None:
        _due(track, row.waiting_time_s, whole, "gives up")
    return track


def _stages(row: RequestRecord, whole: float) -> list[Track]:
    """Prefill and decode; between them the KV cache's way, where two instances shared the work."""
    moved = _kv_moved(row)
    if moved is None:
        return [_prefill(row, whole, row.ttft_s or 0.0), _decode(row, whole)]
    placed, landed, instance = moved
    kv = Track("KV cache", landed - placed, note=f"to {instance}" if instance else "")
    kv.bars.append(_bar(placed, landed, whole, "kv", f"moved from {placed:.3f} s to {landed:.3f} s"))
    return [_prefill(row, whole, placed), kv, _decode(row, whole)]


def _kv_moved(row: RequestRecord) -> tuple[float, float, str] | None:
    """When the decode stage was placed, when its KV had landed there, and where: of the last transfer."""
    for step in reversed(row.decisions):
        figures = step.get("figures") or {}
        landed, took = step.get("at"), figures.get("after_s")
        if step.get("kind") == "transfer" and isinstance(landed, int | float) and isinstance(took, int | float):
            return max(0.0, landed - took), landed, str(figures.get("instance", ""))
    return None


def _prefill(row: RequestRecord, whole: float, until: float) -> Track:
    """From being sent to the first token: the engine's own queue is in it, nobody outside can tell them apart."""
    sent, first = row.queue_s or 0.0, row.ttft_s or 0.0
    track = Track("Prefill", until - sent, note="engine's queue included")
    kind = "" if row.ttft_met else "bad"
    track.bars.append(_bar(sent, until, whole, kind, f"first token after {first:.3f} s"))
    _due(track, row.target_ttft_s, whole, "first token due")
    return track


def _decode(row: RequestRecord, whole: float) -> Track:
    first, last = row.ttft_s or 0.0, row.e2e_s or 0.0
    track = Track("Decode", last - first, note=f"{row.output_tokens} tokens")
    kind = "decode" if row.tpot_met else "bad"
    track.bars.append(_bar(first, last, whole, kind, f"{row.output_tokens} tokens until {last:.3f} s"))
    times = _times(row.token_times)
    for number, at in zip(token_numbers(len(times), row.output_tokens), times, strict=True):
        due = due_s(row, number)
        late = at > due
        title = f"token {number} after {at:.3f} s, due {due:.3f} s"
        track.bars.append(_mark(at, whole, title, "late" if late else "tick"))
    _due(track, due_s(row, row.output_tokens), whole, "last token due")
    return track


def _engine(row: RequestRecord, whole: float) -> Track:
    """Not streamed, or cut before the first token: prefill and decode cannot be seen apart."""
    sent, ended = row.queue_s or 0.0, row.e2e_s or 0.0
    track = Track("Engine", ended - sent, note="first token not seen")
    track.bars.append(_bar(sent, ended, whole, "" if row.attained else "bad", f"{ended - sent:.3f} s in the engine"))
    _due(track, due_s(row, row.output_tokens), whole, "answer due by TTFT and TPOT")
    return track


def _times(summary: Sequence[Any]) -> list[float]:
    return [float(at) for at in summary if isinstance(at, int | float)]


def _answer(row: RequestRecord, whole: float) -> Track:
    track = Track("Whole answer", row.e2e_s)
    if row.e2e_s is not None:
        kind = "engine" if row.attained else "bad"
        track.bars.append(_bar(0.0, row.e2e_s, whole, kind, f"{row.e2e_s:.3f} s end to end"))
    if row.target_deadline_s is not None:
        _due(track, row.target_deadline_s, whole, "deadline")
    return track
