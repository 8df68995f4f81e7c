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


def test_without_more_it_is_the_pinned_one(tmp_path):
    assert any(pin.startswith("torch==") for pin in pinned("torch.txt"))
    assert [call[-2:] for call in asked(tmp_path, "torch")] == [
        ["-r", "requirements/base.txt"],
        ["-r", "requirements/torch.txt"],
    ]


def test_another_torch_takes_the_place_of_the_pinned_one_and_nothing_brings_that_back(tmp_path):
    calls = asked(tmp_path, "test-gpu", "TORCH_SPEC=torch>=2.6")
    installs, (*_, tests) = [call for call in calls if "pip" in call], calls
    assert not any(
        "torch==" in word or ("torch" in word and word.endswith(".txt")) for call in installs for word in call
    )
    wanted = [*(pin for pin in pinned("torch.txt") if not pin.startswith("torch==")), "torch>=2.6"]
    assert any(call[-len(wanted) :] == wanted for call in installs)
    assert installs[-1][-1:] == pinned("torch-dev.txt")
    assert tests == ["-m", "pytest", "-m", "gpu"]


def test_an_environment_that_has_everything_is_used_as_it_is(tmp_path):
    assert asked(tmp_path, "test-gpu", "INSTALL=no") == [["-m", "pytest", "-m", "gpu"]]
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["bin"]
