"""How long new instances took to serve."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from tests import factories

pytestmark = pytest.mark.django_db


def test_starts_and_their_medians(viewer):
    row = factories.instance(ready_at=timezone.now() + timedelta(seconds=2))
    answer = viewer.get("/starts")
    assert answer.status_code == 200
    (start,), (way,) = answer.data["items"], answer.data["ways"]
    assert (start["id"], start["way"], start["weights"]) == (row.pk, "process, cold", "")
    assert start["ready_s"] == pytest.approx(2.0, abs=0.5)
    assert start["served_s"] is None
    assert (way["way"], way["count"], way["served"], way["served_s"]) == ("process, cold", 1, 0, None)


@pytest.mark.parametrize("limit", ["0", "101", "many"])
def test_a_wrong_limit_is_refused_by_name(viewer, limit):
    answer = viewer.get("/starts", limit=limit)
    assert answer.status_code == 400
    assert list(answer.data["error"]["fields"]) == ["limit"]
