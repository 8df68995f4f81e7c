"""Units as people read them, and the same in JavaScript."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from console.templatetags import units
from controller.wording.vocabulary import shown as shown_figure


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.0005, "0.5 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (12.34, "12.3 s"), (300, "5 min"),
        (-0.25, "−250 ms"), (-2.5, "−2.50 s"),
    ],
)  # fmt: skip
def test_times(seconds, text):
    assert units.ms(seconds) == text


@pytest.mark.parametrize(("share", "text"), [(None, "–"), (1.0, "100 %"), (0.9512, "95.1 %"), (0.0, "0 %")])
def test_shares(share, text):
    assert units.percent(share) == text


def test_rates_and_counts():
    assert units.tokens_per_s(1234.5) == "1,234 tok/s"
    assert units.rate(0.25) == "0.2/s"
    assert units.rate(0.02, "/min") == "<0.1/min"
    assert units.rate(0.0) == "0.0/s"
    assert units.count(12000) == "12,000"
    assert units.count(None) == "–"
    assert (units.money(1.5), units.money(7200)) == ("1.5", "7,200")


def test_a_time_carries_its_moment_for_the_browser():
    html = units.when(datetime(2026, 11, 21, 8, 0, 1, tzinfo=UTC))
    assert html == '<time datetime="2026-11-21T08:00:01.000Z" data-format="second">2026-11-21 08:00:01 UTC</time>'
    assert units.when(0.0).startswith('<time datetime="1970-01-01T00:00:00.000Z"')
    assert units.when(None) == "–"


def test_figures_of_a_decision_on_one_line():
    shown = units.figures({"load": 1.123456, "slack_s": -0.25, "policy": "<b>"})
    assert shown == (
        '<span class="figure" title="load: 1.123456">load 112.3 %</span> · '
        '<span class="figure" title="slack_s: -0.25">time left to its TTFT target −250 ms</span> · '
        '<span class="figure" title="policy: &lt;b&gt;">policy: &lt;b&gt;</span>'
    )
    assert units.figures(None) == units.figures({}) == ""


def test_a_share_for_a_meter_is_bounded():
    assert (units.share_of(3, 2), units.share_of(1, 4), units.share_of(1, 0)) == ("1.0000", "0.2500", "0")


@pytest.mark.parametrize(("value", "shown"), [(20480, "20.5 kB"), (999_999, "1 MB"), (0, "0 B"), (None, "–")])
def test_a_size_reads_as_it_does_among_figures(value, shown):
    assert units.size(value) == shown
    if value is not None:
        assert shown_figure("bytes", value) == shown
