from __future__ import annotations

import pytest

from workers import actions, links
from workers.asking import Asker


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at engines wait for every answer, however slow the test's machine."""
    for module in (actions, links):
        monkeypatch.setattr(module, "ASKER", Asker(patience_s=60.0))
        monkeypatch.setattr(module, "ASK_S", 60.0)
    monkeypatch.setattr(actions, "BUDGET_S", 60.0)
    monkeypatch.setattr(links, "TELLER", Asker(patience_s=60.0))
    monkeypatch.setattr(links, "KNOWN", {})
