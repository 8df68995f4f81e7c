"""What make asks of pip for PyTorch: the pinned one, another one, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pinned(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def asked(tmp_path: Path, target: str, *options: str) -> list[list[str]]:
    """The arguments of every call of an environment's python, which stands in for one that has everything.

    `make test INSTALL=no` hands its own options on to every make below it, and these must not have them.
    """
    told, python = tmp_path / "told", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    python.chmod(0o755)
    command = ["make", "--no-print-directory", target, f"VENV={tmp_path / 'venv'}", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    return [line.split() for line in told.read_text().splitlines()]


def installs(calls: list[list[str]]) -> list[list[str]]:
    return [call for call in calls if call[:3] == ["-m", "pip", "install"]]


def test_without_more_it_is_the_pinned_one(tmp_path):
    [pin] = [line for line in pinned("torch.txt") if line.startswith("torch==")]
    calls = installs(asked(tmp_path, "torch"))
    assert [Path(call[-1]).name for call in calls] == ["lock-base.txt", "lock-torch.txt", pin]


def test_what_is_installed_has_its_hashes_checked(tmp_path):
    """torch alone has none: an index decides between its builds."""
    calls = asked(tmp_path, "test-gpu")
    assert ["requirements/lock.py", "pick", "torch-dev"] in calls
    unchecked = [call for call in installs(calls) if "--require-hashes" not in call]
    assert [call[-1].partition("==")[0] for call in unchecked] == ["torch"]


def test_another_torch_takes_the_place_of_the_pinned_one_and_nothing_brings_that_back(tmp_path):
    calls = asked(tmp_path, "test-gpu", "TORCH_SPEC=torch>=2.6")
    assert not any("torch==" in word for call in calls for word in call)
    assert [call[-1] for call in installs(calls) if "--require-hashes" not in call] == ["torch>=2.6"]
    assert calls[-1] == ["-m", "pytest", "-m", "gpu"]


def test_an_environment_that_has_everything_is_used_as_it_is(tmp_path):
    assert asked(tmp_path, "test-gpu", "INSTALL=no") == [["-m", "pytest", "-m", "gpu"]]
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["bin"]
