"""How many files one request passes: a bound that only goes down."""

from __future__ import annotations

import pytest

from benchmarks.bench_walks import walks

BOUNDS = {"collocated": 30, "disaggregated": 39}  # of the gateway


@pytest.mark.slow
def test_a_request_passes_no_more_files_than_it_did() -> None:
    found = walks()
    assert {shape: len(walk["gateway"]) for shape, walk in found.items() if len(walk["gateway"]) > BOUNDS[shape]} == {}
    assert {walk["gateway"][0] for walk in found.values()} == {"api/openai/app.py"}
    assert "controller/dispatch/disaggregation/placing.py" not in found["collocated"]["gateway"]
    assert "workers/engine/kv/transfer.py" in found["disaggregated"]["engines"]
