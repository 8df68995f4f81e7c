"""Stored profiles and knees are another machine's where steps take another time now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_vllm
from benchmarks.servers.stack import StackFleet
from benchmarks.vllm import profiled
from benchmarks.vllm.profiled import Profiled, profile_vllm
from controller.core.types import LatencyCoefficients

FAST = LatencyCoefficients(0.013, 0.000125, 2.9e-8, 0.0125, 1.2e-6, 0.00034)
SLOW = FAST._replace(decode_c=0.0027)


class Measured:
    def __init__(self, coefficients: LatencyCoefficients) -> None:
        self._coefficients = coefficients

    def as_json(self, model: str, urls: Sequence[str]) -> dict[str, Any]:
        return {"coefficients": self._coefficients._asdict(), "kv_capacity_tokens": 1000, "fit": {}}


@pytest.fixture
def engines_are(monkeypatch: pytest.MonkeyPatch) -> Any:
    def now(coefficients: LatencyCoefficients) -> None:
        async def profile_engines(*_: object) -> Measured:
            return Measured(coefficients)

        monkeypatch.setattr(profiled, "profile_engines", profile_engines)

    return now


def test_a_quick_run_measures_and_says_whether_the_stored_profile_holds(engines_are: Any, tmp_path: Path) -> None:
    kept = tmp_path / "profile.json"
    engines_are(FAST)
    assert not profile_vllm((), kept, quick=True).as_stored, "nothing is stored yet"
    assert not kept.exists()
    full = profile_vllm((), kept, quick=False)
    assert full.as_stored
    assert profile_vllm((), kept, quick=True).as_stored

    engines_are(SLOW)
    found = profile_vllm((), kept, quick=True)
    assert not found.as_stored
    assert found.coefficients == SLOW._asdict()
    assert json.loads(kept.read_text())["coefficients"] == FAST._asdict(), "a quick run leaves full results alone"
    assert profile_vllm((), kept, quick=False, resume=True).coefficients == FAST._asdict()


def test_alike_looks_at_prompts_too() -> None:
    known = Profiled(FAST._asdict(), None)
    assert known.alike(replace(known, coefficients=FAST._replace(decode_a=0.013)._asdict()))
    assert not known.alike(replace(known, coefficients=FAST._replace(prefill_b=0.0003)._asdict()))


def test_a_stored_knee_is_used_only_where_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stack:
        fleet = StackFleet("mid", ["a", "b"], "vllm", 32, (), SLOW._asdict(), 4096, 1000)

    class Bench:
        stack = Stack()

    monkeypatch.setattr(bench_vllm, "known_knees", lambda: {"4-task": 12.0})
    bench: Any = Bench()
    assert bench_vllm.knees(bench, ["4-task"], True, {}, stored=True)["4-task"]["rate"] == 12.0
    monkeypatch.setattr(bench_vllm, "search_knee", lambda bench, mix, quick: 11.0 if quick else 13.0)
    found = bench_vllm.knees(bench, ["4-task"], True, {}, stored=False)["4-task"]
    assert found == {"rate": 11.0, "from": "measured for 40 s a rate"}
