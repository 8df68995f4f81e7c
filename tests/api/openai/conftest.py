"""For all tests of the gateway."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis may take longer than a gateway waits for it, which then goes on without what it would
    have read or kept. Tests of that set a bound of their own."""
    for module in ("forks", "steps", "stored_responses", "tool_steps"):
        monkeypatch.setattr(f"api.openai.{module}.READ_S", 10.0)
