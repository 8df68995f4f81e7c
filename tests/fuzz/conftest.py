"""Prints what was tried when the tests end."""

from __future__ import annotations

import pytest

from tests.fuzz import tally


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if tally.CASES:
        for kind, found in tally.FAULTS.items():
            for each in found[:20]:
                print(f"{kind}: {each}")
        print(tally.line(), flush=True)
