"""Starts on the page Scaling: how long each took until it served, and what held it up."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from controller.selectors.fleet import scaling
from controller.services.actors import SYSTEM
from controller.services.decisions import decision_record
from controller.services.records.requests import records_write
from tests import factories


def test_starts_tell_how_long_it_took_to_serve(db):
    row = factories.instance(ready_at=timezone.now() + timedelta(seconds=2))
    arrived = row.created_at + timedelta(seconds=3)
    first = factories.record(instance=row.pk, arrived_at=arrived.timestamp(), ttft_s=0.5)
    later = factories.record(instance=row.pk, arrived_at=arrived.timestamp() + 60, ttft_s=0.1)
    connection.ensure_connection()
    records_write(connection=connection.connection, records=[later, first])
    (start,) = scaling.starts()
    assert start.served_s == pytest.approx(3.5, abs=0.01)
    assert start.ready_s == pytest.approx(2.0, abs=0.5)


def test_one_that_was_ready_again_hours_later_still_took_as_long_as_its_first_start(db):
    """After a restart of `make up`: the column has the time of the last start."""
    row = factories.instance(ready_at=timezone.now() + timedelta(hours=3))
    about = {"subject_type": "instance", "subject": row.pk}
    for after in (timedelta(seconds=2), timedelta(hours=3)):
        decision_record(actor=SYSTEM, kind="instance_ready", reason="healthy", at=row.created_at + after, **about)
    (start,) = scaling.starts()
    assert start.ready_s == pytest.approx(2.0, abs=0.01)


def served_by(row, after_s, ttft_s=0.5):
    arrived = row.created_at + timedelta(seconds=after_s)
    connection.ensure_connection()
    records_write(
        connection=connection.connection,
        records=[factories.record(instance=row.pk, arrived_at=arrived.timestamp(), ttft_s=ttft_s)],
    )


def test_the_wait_for_a_request_moves_no_median(viewer, live_store):
    """One was asked at once; nobody asked the other for two minutes after it was ready."""
    busy, idle = (
        factories.instance(id=name, ready_at=timezone.now() + timedelta(seconds=2)) for name in ("a-1", "b-1")
    )
    served_by(busy, 1, ttft_s=2.5)
    served_by(idle, 122, ttft_s=0.5)
    answer = viewer.get(reverse("scaling"))
    found = {each.id: each for each in answer.context["starts"]}
    assert (found["a-1"].idle_s, found["a-1"].served_s) == (0.0, pytest.approx(3.5, abs=0.1))
    assert found["b-1"].idle_s == pytest.approx(120, abs=0.5)
    assert found["b-1"].served_s == pytest.approx(122.5, abs=0.1), "what was seen stays as it was"
    (way,) = answer.context["ways"]
    assert way.served_s == pytest.approx(3.0, abs=0.2)
    assert (way.served, way.idle) == (2, 1)
    html = answer.content.decode()
    assert "without requests" in html
    assert "excluding time without requests" in html


def test_a_start_that_failed_says_so_with_its_error(viewer, live_store):
    factories.instance(id="gone-1", observed_state="failed", error="exit code 1: <no> such folder " + "x" * 200)
    html = viewer.get(reverse("scaling")).content.decode()
    row = html.split('<tr data-key="gone-1">')[1].split("</tr>")[0]
    assert '<span class="badge bad">failed</span>' in row
    assert "exit code 1: &lt;no&gt; such folder" in row
    assert "x…" in row, "in short; all of it on hover"
