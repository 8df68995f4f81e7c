"""Registered traces. A CSV is checked line by line before it is stored; errors name the line and the column."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

from django.core.exceptions import ValidationError
from django.db import transaction

from controller.models import Experiment, Trace
from controller.services.actors import Actor
from controller.services.decisions import decision_record

BYTES_MAX = 32 * 2**20  # of the uncompressed CSV
ROWS_MAX = 200_000
TOKENS_MAX = 2_000_000  # of one request; more is a wrong unit
SPAN_MAX_S = 31 * 86_400.0
LINE_MAX = 200_000  # characters: a prompt of a million tokens has some 2,000 block ids
REQUIRED = ("input_tokens", "output_tokens")
KEPT = ("arrival_s", *REQUIRED, "type", "session", "turn", "prefix_hashes")
GZIP_MAGIC = b"\x1f\x8b"


class TraceSummary(NamedTuple):
    """What a trace holds: requests, seconds from first to last arrival, mean tokens."""

    requests: int
    span_s: float
    input_tokens_mean: float
    output_tokens_mean: float


def trace_create(*, actor: Actor, name: str, content: bytes) -> Trace:
    """`content`: CSV with a header, gzip or not. Raises ValidationError whose field is `name` or `file`."""
    if not name.strip() or len(name) > 120 or "\x00" in name:
        raise ValidationError({"name": "Must be 1 to 120 characters."})
    text, summary = checked(content)
    row = Trace(
        slug=slug_of(name),
        name=name.strip(),
        content=gzip.compress(text.encode(), compresslevel=6),
        created_by=actor.name,
        **summary._asdict(),
    )
    with transaction.atomic():
        row.save(force_insert=True)
        _audit(actor, "created", row)
    return row


def trace_remove(*, actor: Actor, slug: str) -> None:
    """Raises DoesNotExist, or ValidationError while an experiment that has not ended uses it."""
    with transaction.atomic():
        row = Trace.objects.select_for_update().get(slug=slug)
        using = Experiment.objects.filter(state__in=Experiment.OPEN, spec__workload__path=slug).first()
        if using is not None:
            raise ValidationError(f"Experiment {using.slug} still uses this trace. Cancel it or wait until it ends.")
        _audit(actor, "removed", row)
        row.delete()


def slug_of(name: str) -> str:
    """A readable and unique slug: letters and digits of the name, and six random ones."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return f"{plain or 'unnamed'}-{secrets.token_hex(3)}"


def checked(content: bytes) -> tuple[str, TraceSummary]:
    """The CSV as text with the known columns only, and its summary."""
    rows = csv.DictReader(io.StringIO(_text(content), newline=""))
    missing = [column for column in REQUIRED if column not in (rows.fieldnames or ())]
    if missing:
        _wrong(f"line 1: column {missing[0]} is missing; required: {', '.join(REQUIRED)}; optional: arrival_s")
    columns = [column for column in KEPT if column in (rows.fieldnames or ())]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    summary = _read(rows, columns, writer)
    return out.getvalue(), summary


def _read(rows: csv.DictReader[str], columns: list[str], writer: object) -> TraceSummary:
    count, first, last, prompts, outputs = 0, 0.0, -math.inf, 0, 0
    try:
        for row in rows:
            line = rows.line_num
            count += 1
            if count > ROWS_MAX:
                _wrong(f"line {line}: more than {ROWS_MAX:,} requests")
            at = _seconds(row, line) if "arrival_s" in columns else 0.0
            if at < last:
                _wrong(f"line {line}, arrival_s: {at:g} is before the previous line ({last:g}); sort by arrival_s")
            prompts += _tokens(row, "input_tokens", line)
            outputs += _tokens(row, "output_tokens", line)
            first, last = (at if count == 1 else first), at
            writer.writerow([row.get(column) or "" for column in columns])  # type: ignore[attr-defined]
    except csv.Error as error:
        _wrong(f"line {rows.line_num}: {error}")
    if not count:
        _wrong("line 2: there are no requests below the header")
    if last - first > SPAN_MAX_S:
        _wrong(f"arrival_s: spans {last - first:,.0f} s, more than {SPAN_MAX_S:,.0f}; are these milliseconds?")
    return TraceSummary(count, last - first, prompts / count, outputs / count)


def _text(content: bytes) -> str:
    raw = content
    if raw[:2] == GZIP_MAGIC:
        unpacker = zlib.decompressobj(31)
        try:
            raw = unpacker.decompress(raw, BYTES_MAX + 1)
        except zlib.error as error:
            _wrong(f"not a readable gzip file: {error}")
    if len(raw) > BYTES_MAX:
        _wrong(f"larger than {BYTES_MAX // 2**20} MB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        _wrong(f"line {line}: not UTF-8 text")
    if "\x00" in text:
        line = text[: text.index("\x00")].count("\n") + 1
        _wrong(f"line {line}: contains a NUL character")
    long = next((number for number, line in enumerate(text.split("\n"), 1) if len(line) > LINE_MAX), None)
    if long is not None:
        _wrong(f"line {long}: longer than {LINE_MAX:,} characters")
    return text


def _seconds(row: Mapping[str, str | None], line: int) -> float:
    value = _number(row, "arrival_s", line)
    if value < 0:
        _wrong(f"line {line}, arrival_s: {value:g} is negative")
    return value


def _tokens(row: Mapping[str, str | None], column: str, line: int) -> int:
    value = _number(row, column, line)
    if value != int(value) or not 0 <= value <= TOKENS_MAX:
        _wrong(f"line {line}, {column}: {value:g} is not a whole number of tokens from 0 to {TOKENS_MAX:,}")
    return int(value)


def _number(row: Mapping[str, str | None], column: str, line: int) -> float:
    text = (row.get(column) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        shown = text[:40] or "nothing"
        _wrong(f"line {line}, {column}: {shown!r} is not a number")
    return value


def rows_of(trace: Trace) -> Iterable[dict[str, str]]:
    """The stored CSV, row by row."""
    return csv.DictReader(io.StringIO(gzip.decompress(bytes(trace.content)).decode()))


def _wrong(message: str) -> NoReturn:
    raise ValidationError({"file": message})


def _audit(actor: Actor, what: str, row: Trace) -> None:
    decision_record(
        actor=actor,
        kind=f"trace_{what}",
        subject_type="trace",
        subject=row.slug,
        reason=f"{actor.type}_{what}",
        inputs={"name": row.name, "requests": row.requests, "span_s": row.span_s},
        outcome={"id": row.pk},
    )
