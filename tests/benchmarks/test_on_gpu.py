"""Steps on a GPU within a budget: each by itself, with what it found written at once."""

import json
import os
import time

import pytest

from benchmarks.on_gpu import LEAST_S, GpuStep, last_object, main, on_cpu, on_cuda, run

PRINTS = ("-c", "import json; print('table'); print(json.dumps({'ms': 4.5}))")
FAILS = ("-c", "print('half done'); raise SystemExit(3)")
HANGS = (
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)",
)


def test_a_step_that_fails_does_not_stop_the_others(tmp_path):
    found = run(iter([GpuStep("bad", FAILS, 20), GpuStep("good", PRINTS, 20)]), tmp_path, 60)
    assert [(each.name, each.outcome, each.result) for each in found] == [
        ("bad", "failed", {}), ("good", "passed", {"ms": 4.5}),
    ]  # fmt: skip
    assert (tmp_path / "bad.log").read_text() == "half done\n"


def test_a_late_step_ends_with_its_children(tmp_path):
    began = time.monotonic()
    (late,) = run(iter([GpuStep("late", HANGS, 2)]), tmp_path, 60)
    assert (late.outcome, time.monotonic() - began < 15) == ("late", True)
    child = int((tmp_path / "late.log").read_text())
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """A process that ended and was not waited for yet does not run."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_was_found_is_written_after_each_step(tmp_path):
    def steps():
        yield GpuStep("first", PRINTS, 20)
        (written,) = json.loads((tmp_path / "steps.json").read_text())
        assert (written["name"], written["outcome"], written["result"]) == ("first", "passed", {"ms": 4.5})
        yield GpuStep("second", FAILS, 20)

    assert len(run(steps(), tmp_path, 60)) == 2


def test_a_step_that_the_budget_has_no_time_for_is_left_out(tmp_path):
    found = run(iter([GpuStep("first", PRINTS, 20)]), tmp_path, LEAST_S / 2)
    assert [each.outcome for each in found] == ["left_out"]
    assert not (tmp_path / "first.log").exists()


@pytest.mark.parametrize("text", ["", "\n", "table\n", "[1]\n", '{"cut": '])
def test_a_last_line_that_is_no_object_is_no_result(tmp_path, text):
    (tmp_path / "log").write_text(text)
    assert last_object(tmp_path / "log") == {}


def test_both_devices_have_the_same_steps_in_the_same_order(tmp_path):
    cpu, cuda = list(on_cpu(tmp_path)), list(on_cuda(tmp_path))
    assert [each.name for each in cpu] == [each.name for each in cuda]
    modules = [[part for part in each.command if part.startswith("benchmarks.")] for each in cpu]
    assert modules == [[part for part in each.command if part.startswith("benchmarks.")] for each in cuda]
    assert os.path.isdir("tests/workers/engine/torch")


def test_a_step_that_does_not_exist_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--device", "cpu", "--only", "device,speed"])
    assert "--only: no step is called speed" in capsys.readouterr().err


def test_chosen_steps_alone_run(tmp_path, capsys):
    pytest.importorskip("torch")
    assert main([str(tmp_path), "--device", "cpu", "--only", "device"]) == 0
    assert [each["name"] for each in json.loads((tmp_path / "steps.json").read_text())] == ["device"]
