"""The timeline of one finished request against its deadlines. Seconds after arrival, shares 0..1 of the width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from console.wording.attained import attained
from controller.models import RequestRecord
from controller.wording.measures import number
from controller.wording.request_steps import (
    due_s,
    first_token_stages,
    is_given_up,
    longest_stage,
    never_decoded_s,
    prefilled_s,
    step,
)
from controller.wording.vocabulary import reason_in_words

MARGIN = 1.03  # keeps the last mark off the edge
TICKS = 6  # at most
LEAST_SHOWN = 0.005  # of the width: a shorter wait would be no bar
FARTHEST = 3.0  # times the measured span: loose targets must not squeeze the bars into a sliver


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """`kind` is the bar's style: queue, engine, bad, tick, late, due, decision or none."""

    start: float
    share: float
    kind: str
    title: str


@dataclass(slots=True)
class TimelineTrack:
    """One row of the timeline; `note` is shown beside its figure."""

    label: str
    value_s: float | None
    bars: list[TimelineBar] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """`axis`: position and label of each tick."""

    tracks: list[TimelineTrack]
    axis: list[tuple[float, str]]


def timeline(row: RequestRecord, whole_s: float | None = None) -> Timeline:
    """`whole_s`: the time span of the timeline, to put two requests on one scale; by default the request's own."""
    whole = whole_s or span_s(row)
    tracks = [_decisions(row, whole), _queue(row, whole)]
    if row.queue_s is not None and row.e2e_s is not None:
        tracks += _stages(row, whole) if row.ttft_s is not None else _unseen(row, whole)
    tracks.append(_answer(row, whole))
    return Timeline([track for track in tracks if track], axis(whole))


def span_s(row: RequestRecord) -> float:
    """The time span: up to the latest time, measured or due. A due time far beyond becomes a note instead."""
    measured = (row.e2e_s, row.ttft_s, row.queue_s)
    due = (row.target_ttft_s, row.target_thinking_s, row.target_deadline_s, due_s(row, row.output_tokens))
    latest = max([value for value in (*measured, *due) if value is not None] or [0.0])
    happened = max([value for value in measured if value is not None] or [0.0])
    return min(latest, FARTHEST * max(happened, row.target_ttft_s) or latest) * MARGIN or 1.0


def token_numbers(kept: int, tokens: int) -> list[int]:
    """The tokens whose times a record keeps: the 1st, 2nd, 4th, 8th ... and the last."""
    return [*(2**index for index in range(kept - 1)), tokens] if kept else []


def axis(whole: float) -> list[tuple[float, str]]:
    """Round times, at most TICKS of them, from zero."""
    rough = whole / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    apart = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [(index * apart / whole, f"{index * apart:g} s") for index in range(int(whole / apart) + 1)]


def _bar(start_s: float, end_s: float, whole: float, kind: str, title: str) -> TimelineBar:
    return TimelineBar(start_s / whole, max(0.0, end_s - start_s) / whole, kind, title)


def _mark(at_s: float, whole: float, title: str, kind: str = "due") -> TimelineBar:
    return TimelineBar(at_s / whole, 0.0, kind, title)


def _due(track: TimelineTrack, at_s: float, whole: float, what: str) -> None:
    """Adds a due mark, or a note if the due time is beyond the timeline."""
    if at_s <= whole:
        track.bars.append(_mark(at_s, whole, f"{what} after {at_s:.4g} s"))
    else:
        track.note = "; ".join(part for part in (track.note, f"{what} after {at_s:.4g} s") if part)


def _decisions(row: RequestRecord, whole: float) -> TimelineTrack | None:
    """A dot for each recorded step, with its number in the list below the timeline."""
    bars = [
        _mark(at, whole, f"{place} {step(taken)['what']} after {at:.3f} s", "decision")
        for place, taken in enumerate(row.decisions, 1)
        if isinstance(at := taken.get("at"), int | float)
    ]
    return TimelineTrack("Decisions", None, bars, note=f"{len(bars)} recorded") if bars else None


def _queue(row: RequestRecord, whole: float) -> TimelineTrack:
    waited = row.queue_s if row.queue_s is not None else row.e2e_s
    track = TimelineTrack("Queue", waited, note="" if row.queue_s is not None else "never sent")
    if waited is not None:
        kind = "bad" if row.queue_s is None or _took_longest(row, "queue") else "queue"
        track.bars.append(_bar(0.0, waited, whole, kind, f"{waited:.3f} s in the gateway queue"))
    if row.queue_s is None:  # no other row can show it
        _due(track, row.target_ttft_s, whole, "first token due")
    if row.waiting_time_s is not None:
        _due(track, row.waiting_time_s, whole, "times out")
    return track


def _stages(row: RequestRecord, whole: float) -> list[TimelineTrack]:
    """Prefill and decode; with disaggregation the KV transfer between them."""
    transfers, decode = kv_transfers(row), _decode(row, whole)
    if not transfers:
        return [_prefill(row, whole, row.ttft_s or 0.0), decode]
    ended = prefilled_s(row)
    prefill = _prefill(row, whole, transfers[-1].began_s if ended is None else ended, due=False)
    wait, kv = _wait(row, whole), _kv(transfers, whole, late=_took_longest(row, "transfer"))
    _due(kv, row.target_ttft_s, whole, "first token due")
    return [prefill, *([wait] if wait else []), kv, decode]


def _took_longest(row: RequestRecord, stage: str) -> bool:
    """Was the first token late, and did this stage take most of the time until it?"""
    return not row.ttft_met and longest_stage(row) == stage


def _wait(row: RequestRecord, whole: float) -> TimelineTrack | None:
    """Between prefill and the KV transfer that succeeded; None if too short to be seen."""
    stage = next(each for each in first_token_stages(row) if each.name == "wait")
    if stage.seconds < LEAST_SHOWN * whole:
        return None
    kind = "bad" if _took_longest(row, "wait") else "queue"
    title = f"{stage.seconds:.3f} s without a decode instance"
    bar = _bar(stage.began_s, stage.ended_s, whole, kind, title)
    return TimelineTrack("Wait for decode", stage.seconds, [bar], "until a decode instance had room")


def _unseen(row: RequestRecord, whole: float) -> list[TimelineTrack]:
    """Without an observed first token. A prefill instance still reports when it finished."""
    waits_from = never_decoded_s(row)
    if waits_from is not None:
        return _never_decoded(row, waits_from, whole)
    ended = prefilled_s(row) if row.prefill_instance else None
    if ended is None:
        return [_engine(row, whole, row.queue_s or 0.0)]
    transfers = kv_transfers(row)
    kv = [_kv(transfers, whole)] if transfers else []
    return [_prefill(row, whole, ended), *kv, _engine(row, whole, ended)]


def _never_decoded(row: RequestRecord, waits_from: float, whole: float) -> list[TimelineTrack]:
    """Prefilled, but ended before a decode instance took it: the prefill engine was done long before."""
    transfers, ended = kv_transfers(row), row.e2e_s or 0.0
    begins = max([waits_from, *(each.ended_s for each in transfers)])
    wait = TimelineTrack("Wait for decode", ended - begins, note="timed out" if is_given_up(row) else "never placed")
    kind = "bad" if attained(row).badge == "bad" else "queue"
    wait.bars.append(_bar(begins, ended, whole, kind, f"{ended - begins:.3f} s without a decode instance"))
    return [_prefill(row, whole, waits_from), *([_kv(transfers, whole)] if transfers else []), wait]


class TimelineTransfer(NamedTuple):
    """One attempt to transfer the KV cache to a decode instance. Seconds after arrival."""

    began_s: float
    ended_s: float
    source: str
    target: str
    arrived: bool
    title: str  # shown when the bar is hovered


def kv_transfers(row: RequestRecord) -> list[TimelineTransfer]:
    """In the order of their ends; only the last one can have succeeded."""
    found = []
    for taken in row.decisions:
        figures = taken.get("figures") or {}
        ended, took = taken.get("at"), figures.get("after_s")
        if taken.get("kind") != "transfer" or not isinstance(ended, int | float) or not isinstance(took, int | float):
            continue
        began, arrived = max(0.0, ended - took), figures.get("outcome", "done") == "done"
        words = [f"attempt {figures.get('attempt', 1)}", f"{began:.3f} s to {ended:.3f} s"]
        if figures.get("early_bytes"):
            early = f"{number(figures['early_bytes'], 'bytes')} of them during prefill"
            words.append(f"{number(figures['bytes'], 'bytes')}, {early}")
        elif figures.get("bytes") and figures.get("seconds"):
            moving_s = figures["seconds"] - figures.get("held_s", 0.0)
            rate = f", {number(figures['bytes'] / moving_s, 'bytes/s')}" if moving_s > 0 else ""
            words.append(f"{number(figures['bytes'], 'bytes')} in {figures['seconds']:.4f} s{rate}")
        if figures.get("held_s"):
            words.append(f"held for {figures['held_s']:.3f} s for more urgent transfers")
        if not arrived:
            words.append(reason_in_words(str(taken.get("reason", ""))))
        elif figures.get("undo"):  # how its source was cleaned up
            words.append(reason_in_words(str(figures["undo"])))
        target, source = str(figures.get("instance", "")), str(figures.get("source", ""))
        found.append(TimelineTransfer(began, ended, source, target, arrived, ", ".join(words)))
    return found


def _kv(transfers: list[TimelineTransfer], whole: float, late: bool = False) -> TimelineTrack:
    """`late`: it made the first token late."""
    last = transfers[-1]
    way = f"{last.source} to {last.target}" if last.source else f"to {last.target}" if last.target else ""
    tries = f"{len(transfers)} attempts" if len(transfers) > 1 else ""
    track = TimelineTrack(
        "KV transfer", last.ended_s - last.began_s, note=", ".join(part for part in (way, tries) if part)
    )
    for each in transfers:
        track.bars.append(
            _bar(each.began_s, each.ended_s, whole, "kv" if each.arrived and not late else "bad", each.title)
        )
    return track


def _prefill(row: RequestRecord, whole: float, until: float, due: bool = True) -> TimelineTrack:
    """From dispatch to the first token, or to the end of a prefill alone. It includes the engine's own queue, which
    cannot be told apart from outside. `due`: mark here when the first token was due."""
    sent = row.queue_s or 0.0
    prefill = row.instance if never_decoded_s(row) is not None else row.prefill_instance
    where = f"on {prefill}, including its queue" if prefill else "including the engine's queue"
    track = TimelineTrack("Prefill", until - sent, note=where)
    late = until > row.target_ttft_s if row.ttft_s is None else longest_stage(row) in ("prefill", "engine")
    kind = "bad" if late and not row.ttft_met else ""
    two_stages = row.ttft_s is None or until < row.ttft_s
    said = f"prefilled after {until:.3f} s" if two_stages else f"first token after {until:.3f} s"
    track.bars.append(_bar(sent, until, whole, kind, said))
    if due:
        _due(track, row.target_ttft_s, whole, "first token due")
    return track


def _decode(row: RequestRecord, whole: float) -> TimelineTrack:
    first, last = row.ttft_s or 0.0, row.e2e_s or 0.0
    where = f" on {row.instance}" if row.prefill_instance else ""
    track = TimelineTrack("Decode", last - first, note=f"{row.output_tokens} tokens{where}")
    kind = "decode" if row.tpot_met else "bad"
    track.bars.append(_bar(first, last, whole, kind, f"{row.output_tokens} tokens until {last:.3f} s"))
    times = _times(row.token_times)
    for token, at in zip(token_numbers(len(times), row.output_tokens), times, strict=True):
        due = due_s(row, token)
        late = at > due
        title = f"token {token} after {at:.3f} s, due {due:.3f} s"
        track.bars.append(_mark(at, whole, title, "late" if late else "tick"))
    _due(track, due_s(row, row.output_tokens), whole, "last token due")
    return track


def _engine(row: RequestRecord, whole: float, sent: float) -> TimelineTrack:
    """Not streamed, or cut off before the first token: prefill and decode cannot be told apart."""
    ended = row.e2e_s or 0.0
    what = f"KV transfer and decode on {row.instance}, " if row.prefill_instance else ""
    track = TimelineTrack("Engine", ended - sent, note=f"{what}first token not observed")
    kind = "bad" if attained(row).badge == "bad" else ""
    track.bars.append(_bar(sent, ended, whole, kind, f"{ended - sent:.3f} s on the engine"))
    _due(track, due_s(row, row.output_tokens), whole, "last token due")
    return track


def _times(summary: Sequence[Any]) -> list[float]:
    return [float(at) for at in summary if isinstance(at, int | float)]


def _answer(row: RequestRecord, whole: float) -> TimelineTrack:
    track = TimelineTrack("End to end", row.e2e_s)
    if row.e2e_s is not None:
        kind = "bad" if attained(row).badge == "bad" else "engine"
        track.bars.append(_bar(0.0, row.e2e_s, whole, kind, f"{row.e2e_s:.3f} s end to end"))
    if row.target_deadline_s is not None:
        _due(track, row.target_deadline_s, whole, "deadline")
    if row.target_thinking_s is not None:
        _due(track, row.target_thinking_s, whole, "thinking deadline")
    return track
