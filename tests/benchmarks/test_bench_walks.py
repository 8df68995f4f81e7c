"""How many files one request passes: a bound that only goes down."""

from __future__ import annotations

import pytest

from benchmarks.bench_walks import walks

BOUNDS = {"collocated": 47, "disaggregated": 59}


@pytest.mark.slow
def test_a_request_passes_no_more_files_than_it_did() -> None:
    found = walks()
    assert {shape: len(files) for shape, files in found.items() if len(files) > BOUNDS[shape]} == {}
    assert found["collocated"][0] == found["disaggregated"][0] == "api/openai/app.py"
    assert "controller/dispatch/disaggregation/placing.py" not in found["collocated"]
