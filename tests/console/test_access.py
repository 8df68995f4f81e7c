"""Refused actions on pages are in the audit, within the bounds of all refusals."""

from __future__ import annotations

import pytest

from controller.models import Decision
from controller.services.records import refusals

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture(autouse=True)
def _new_log(monkeypatch):
    monkeypatch.setattr(refusals, "LOG", refusals.Bounded())


def test_who_has_too_low_a_role_cannot_fill_the_audit(viewer):
    for _ in range(refusals.BURST + 30):
        assert viewer.post("/queue/command/", {"kind": "pause"}).status_code == 403
    rows = Decision.objects.filter(kind="access_refused", reason="role_too_low").order_by("id")
    assert len(rows) == refusals.BURST
    assert rows[0].inputs == {"method": "POST", "role": "viewer", "needed": "operator", "not_written_before": 0}
