"""`/api/v1/graph-versions`: the versions of each tenant's pattern graphs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import GraphVersion
from controller.predict.answer_lengths import MOST_AGE_S

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def version(tenant, number, age_s=60.0, **fields):
    at = timezone.now() - timedelta(seconds=age_s)
    given = {
        "tenant": tenant, "version": number, "trained_at": at, "first_at": at - timedelta(hours=2), "last_at": at,
        "workflows": 400, "graphs": 120, "judged": 100, "matched": 0.9, "error": 0.02, "even_error": 0.1, **fields,
    }  # fmt: skip
    return GraphVersion.objects.create(**given)


def test_each_tenant_has_its_versions_and_which_is_in_force(viewer):
    version("acme", 1, digest="0" * 64, content=b"graphs")
    version("acme", 2, refused="wrong by 0.3 of the time left")
    version("old", 1, age_s=MOST_AGE_S + 60)
    answer = viewer.get("/graph-versions")
    assert answer.status_code == 200
    acme, old = answer.data["items"]
    assert (acme["tenant"], acme["in_force"]) == ("acme", 1)
    assert [row["version"] for row in acme["versions"]] == [2, 1]
    assert acme["versions"][0]["refused"] == "wrong by 0.3 of the time left"
    assert (acme["versions"][1]["error"], acme["versions"][1]["matched"]) == (0.02, 0.9)
    assert "content" not in acme["versions"][1]
    assert old["in_force"] is None
