"""Which program the launcher of a Ray job starts."""

from __future__ import annotations

from typing import Any

import pytest

from workers.ray.launcher import EngineRun, StartRefused

ORDER: dict[str, Any] = {"command": ["engine"], "environment": {}, "secrets": {}, "health_path": "/health"}


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A program of that name in the job's working folder, and in no folder of PATH."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere:", ":/nowhere"])
@pytest.mark.parametrize("told", [None, "", ":/opt", "/opt::/usr"])
def test_the_working_folder_of_a_job_is_not_searched(beside, monkeypatch, told, path):
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("ENGINE_PATH", raising=False)
    if told is not None:
        monkeypatch.setenv("ENGINE_PATH", told)
    with pytest.raises(StartRefused, match="engine was not found"):
        EngineRun(ORDER, "127.0.0.1", 1, "")


def test_engine_path_is_searched_first(beside, monkeypatch):
    monkeypatch.setenv("ENGINE_PATH", str(beside))
    run = EngineRun(ORDER, "127.0.0.1", 1, "")
    assert run.process.wait(timeout=10) == 0
