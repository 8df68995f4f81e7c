"""How many files one request passes: a bound that only goes down."""

from __future__ import annotations

import pytest

from benchmarks.bench_walks import distinct, walks

# "all": of the gateway and the engines together. Keys of engines (decision 171), turns of senders (172), learned
# lengths (202: their use, and their features), deadlines and bounds for engines (228: told, read, and what both agree
# on) and goodput by type (246) came later.
BOUNDS = {
    "collocated": {"gateway": 34, "all": 62},
    "disaggregated": {"gateway": 44, "all": 81},
}


@pytest.mark.slow
def test_a_request_passes_no_more_files_than_it_did() -> None:
    found = walks()
    for shape, walk in found.items():
        passed = {"gateway": walk["gateway"], "all": distinct(walk)}
        over = {part: files for part, files in passed.items() if len(files) > BOUNDS[shape][part]}
        assert not over, f"{shape}: { ({part: len(files) for part, files in over.items()}) }"
    assert {walk["gateway"][0] for walk in found.values()} == {"api/openai/app.py"}
    assert "controller/dispatch/disaggregation/placing.py" not in found["collocated"]["gateway"]
    assert "workers/engine/kv/transfer.py" in found["disaggregated"]["engines"]
