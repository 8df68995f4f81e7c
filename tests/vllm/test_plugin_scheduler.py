"""The plug-in within vLLM's own scheduler (`scheduler_script.py`, in vLLM's environment)."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from benchmarks.servers.engines import ROOT, VLLM_HOME, vllm_missing

pytestmark = pytest.mark.vllm
SCRIPT = ROOT / "tests" / "vllm" / "scheduler_script.py"
CASES = (
    "s_edf", "heap", "edf", "fcfs", "calm", "forged", "aborted", "preempted_edf", "preempted_calm", "preempted_slack",
    "paused", "full", "layouts",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    done = subprocess.run(
        [str(VLLM_HOME / "bin" / "python"), str(SCRIPT), *CASES],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_the_queue_follows_the_deadlines_of_the_hints(found: dict[str, Any]) -> None:
    assert found["s_edf"]["first"] == found["heap"]["first"] == ["running", "near", "far", "none", "late"]
    assert found["edf"]["first"] == ["running", "late", "near", "far", "none"]
    assert found["fcfs"]["first"] == ["running", "late", "far", "near", "none"]
    assert found["calm"]["first"][-1] == "late"


def test_hints_that_no_gateway_sends_are_as_good_as_none(found: dict[str, Any]) -> None:
    assert found["forged"]["first"] == ["running", "near", "text", "huge", "nan", "list"]


def test_cancelled_requests_leave_nothing_behind(found: dict[str, Any]) -> None:
    assert found["aborted"] == {"ended": ["b", "d"], "kept": 0}


@pytest.mark.parametrize("case", ["preempted_edf", "preempted_calm", "preempted_slack"])
def test_preempted_requests_get_all_their_tokens_and_all_blocks_come_back(found: dict[str, Any], case: str) -> None:
    was = found[case]
    assert was["preempted"] > 0
    assert (was["kept"], was["held"]) == (0, 0.0)
    assert was["tokens"] == dict.fromkeys("abcdef", 60)


def test_slack_lets_a_long_answer_sit_out_steps_and_not_for_ever(found: dict[str, Any]) -> None:
    assert found["paused"]["alone"] >= 3
    assert "long" in found["paused"]["ended"]


def test_a_plan_that_pauses_all_for_one_without_blocks_does_not_stop_the_server(found: dict[str, Any]) -> None:
    assert found["full"] == {"ended": ["a", "b", "tight"], "kept": 0}


def test_kv_of_other_numbers_or_packed_in_another_way_is_told_apart(found: dict[str, Any]) -> None:
    """Two bytes a number, or the same numbers in another order: the same size, and another meaning."""
    made = found["layouts"]
    assert made["bfloat16"] == made["again"]
    assert len({made["bfloat16"], made["float16"], made["amx"]}) == 3
    assert made["here"], "vLLM still says how it packs"
