"""The same targets by atheris, which keeps what reaches new code: some seconds of all in CI, more of each by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import tally
from tests.fuzz.targets import TARGETS

pytestmark = [pytest.mark.fuzz, pytest.mark.db]
ROOT = Path(__file__).resolve().parents[2]
EXECUTED = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
SECONDS = 15 if tally.QUICK else 25


@pytest.mark.parametrize("name", ["all"] if tally.QUICK else sorted(TARGETS))
def test_no_input_that_reaches_new_code_is_an_error(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", name, str(SECONDS)]
    kept = {"capture_output": True, "text": True, "errors": "replace", "timeout": SECONDS + 60}
    done = subprocess.run(command, cwd=ROOT, check=False, **kept)
    said = done.stdout + done.stderr
    counted = EXECUTED.search(said)
    assert counted is not None or done.returncode, said[-3000:]
    for _ in range(int(counted[1]) if counted else 0):
        tally.tried(name, "atheris")
    if done.returncode:
        start = said.find("Uncaught Python exception")
        tally.fault("crashes", f"{name}, by atheris: {said[max(0, start) :][:500]}")
    assert done.returncode == 0, said[-3000:]
