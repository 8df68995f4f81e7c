"""Units as filters: `{{ 0.25|ms }}` is "250 ms". What is not known is a dash. `static/js/format.js` says the same."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from console.wording.attained import attained, cancelled_how
from controller.wording.measures import DASH, count, ms, number
from controller.wording.vocabulary import Figure, figure, reason_in_words, ruled_out, shown

register = template.Library()


register.filter("ms", ms)
register.filter("count", count)
register.filter("attained", attained)
register.filter("cancelled_how", cancelled_how)


@register.filter
def percent(share: float | None, digits: int = 1) -> str:
    if share is None or share == "":
        return DASH
    text = f"{share * 100:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


@register.filter
def rate(value: float | None, unit: str = "/s") -> str:
    if value is None or value == "":
        return DASH
    if 0 < value < 0.05:
        return f"<0.1{unit}"  # it is not 0, which 0.0 would say
    return f"{value:.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"


@register.filter
def tokens_per_s(value: float | None) -> str:
    return rate(value, " tok/s")


@register.filter
def money(value: float | None) -> str:
    """Cost in the units of `unit_cost`; two decimals below ten."""
    if value is None or value == "":
        return DASH
    return f"{value:,.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:,.0f}"


@register.filter
def bytes_per_s(value: float | None) -> str:
    """Bandwidth in decimal units, as networks count: 1.25e10 is "12.5 GB/s"."""
    return DASH if value is None or value == "" else number(value, "bytes/s")


@register.filter
def size(value: float | None) -> str:
    """Bytes in decimal units, on every page: 20480 is "20.5 kB"."""
    return DASH if value is None or value == "" else number(value, "bytes")


@register.filter
def when(at: datetime | float | None, form: str = "second") -> SafeString | str:
    """A <time> element in UTC; script shows the reader's own time and keeps UTC on hover. Takes epoch seconds too."""
    if at is None or at == "":
        return DASH
    moment = at if isinstance(at, datetime) else datetime.fromtimestamp(at, tz=UTC)
    moment = moment.astimezone(UTC)
    shown = moment.strftime("%Y-%m-%d %H:%M UTC" if form == "minute" else "%Y-%m-%d %H:%M:%S UTC")
    stamp = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return format_html('<time datetime="{}" data-format="{}">{}</time>', stamp, form, shown)


@register.filter
def figures(values: dict[str, Any] | None) -> SafeString:
    """The numbers behind a decision on one line, in words and with units; as they are recorded on hover."""
    each = (figure(key, value) for key, value in (values or {}).items())
    return format_html_join(" · ", '<span class="figure" title="{}">{}</span>', ((one.raw, one.text) for one in each))


@register.filter
def as_figure(value: Any, key: str) -> str:
    """The value of one figure by its key: `{{ 0.05|as_figure:"slack_s" }}` is "50 ms"."""
    return shown(key, value)


@register.filter
def alternatives(rejected: dict[str, Any] | None) -> list[Figure]:
    """What was not chosen, each with what ruled it out."""
    return [Figure(name, ruled_out(why), f"{why}") for name, why in (rejected or {}).items()]


@register.filter
def share_of(part: float | None, whole: float | None) -> str:
    """A share 0..1 for `data-share`, with a plain point whatever the locale."""
    return f"{max(0.0, min(1.0, (part or 0) / whole)):.4f}" if whole else "0"


@register.filter
def in_words(code: str) -> str:
    """A reason's code as people say it."""
    return reason_in_words(code)
