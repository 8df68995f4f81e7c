"""The engine folder: desired states become processes, and what the provisioner reads back. Real engines, no GPU."""

import os
import signal

import pytest

from controller.engine.process_spec import FLAGS, OPTIONS, SAYABLE, refusal
from tests.waiting import until
from workers.engine.config import build_parser, parse
from workers.provisioners import ProcessProvisioner
from workers.supervisor import health_watch
from workers.supervisor.engine_processes import EngineFolder, engine_argv, engine_env, last_error

FAST = {"profile": "constant:1ms", "model": "m", "max_num_seqs": 2, "note": "for the reader"}


@pytest.fixture
def folder(tmp_path):
    engines = EngineFolder(tmp_path / "engines", tmp_path, dict(os.environ))
    yield engines
    engines.stop_all(lambda: True)


def settle(folder, condition):
    """Let the supervisor go on until `condition` holds."""
    until(lambda: condition() or folder.sync(), what=ProcessProvisioner(folder.folder).observe)


def states(folder):
    return {seen.id: seen.state for seen in ProcessProvisioner(folder.folder).observe()}


def test_every_option_of_a_spec_is_one_of_the_engines():
    known = {action.dest for action in build_parser()._actions}
    assert set(OPTIONS) <= known


def test_notes_in_a_spec_do_not_reach_the_command_line():
    argv = engine_argv(8123, {**FAST, "kv_capacity_tokens": 3200})
    assert "for the reader" not in argv
    assert argv[argv.index("--kv-blocks") + 1] == "200"
    assert argv[argv.index("--max-num-seqs") + 1] == "2"


def test_all_that_a_spec_may_say_reaches_the_engine_or_its_start():
    known = {action.dest for action in build_parser()._actions}
    assert set(SAYABLE) - known == {"folder", "kv_capacity_tokens", "start_after"}
    assert refusal(SAYABLE) == ""


def test_an_option_without_a_value_is_named_alone():
    assert set(FLAGS) <= {action.dest for action in build_parser()._actions}
    argv = engine_argv(8123, {**FAST, "scheduler": "slackline", "deadlines": True})
    assert argv[-1] == "--deadlines"
    assert "--deadlines" not in engine_argv(8123, {**FAST, "deadlines": False})


def test_a_batching_policys_knobs_arrive():
    argv = engine_argv(8123, {**FAST, "batching": "calm", "batching_options": {"slots": 7}})
    assert parse(argv[3:]).batching.config.slots == 7


@pytest.mark.parametrize(
    ("mine", "held", "seen"),
    [(None, [3], "3"), (None, [0, 2], "0,2"), ("4,5,6", [0, 2], "4,6"), ("GPU-a,GPU-b", [1], "GPU-b")],
)
def test_an_engine_sees_the_devices_that_it_holds_and_no_others(mine, held, seen):
    env = {"HOME": "/root"} | ({} if mine is None else {"CUDA_VISIBLE_DEVICES": mine})
    assert engine_env(env, {"device_indexes": held}) == {"HOME": "/root", "CUDA_VISIBLE_DEVICES": seen}


@pytest.mark.parametrize("desired", [{}, {"device_indexes": []}])
def test_one_that_holds_none_sees_what_it_finds(desired):
    assert engine_env({"CUDA_VISIBLE_DEVICES": "4,5"}, desired) == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_a_device_that_the_engines_may_not_use_is_named_and_nothing_starts(folder):
    folder.env = {**folder.env, "CUDA_VISIBLE_DEVICES": "4,5"}
    provisioner = ProcessProvisioner(folder.folder)
    provisioner.start("a", {**FAST, "device_indexes": [2]})
    folder.sync()
    [seen] = provisioner.observe()
    assert (seen.state, seen.error) == ("exited", "device 2 is not among the 2 of CUDA_VISIBLE_DEVICES=4,5")
    assert folder.pids() == []
    provisioner.stop("a", 5.0)
    folder.sync()
    assert list(folder.folder.glob("*.state.json")) == []


def test_from_created_to_ready_to_gone(folder):
    provisioner = ProcessProvisioner(folder.folder)
    provisioner.start("a", FAST)
    settle(folder, lambda: states(folder) == {"a": "ready"})
    [seen] = provisioner.observe()
    assert seen.url.startswith("http://127.0.0.1:")
    provisioner.stop("a", 5.0)
    settle(folder, lambda: states(folder) == {})
    assert list(folder.folder.iterdir()) == []


def test_a_killed_engine_stays_down_until_its_desired_state_is_withdrawn(folder):
    provisioner = ProcessProvisioner(folder.folder)
    provisioner.start("a", FAST)
    settle(folder, lambda: states(folder) == {"a": "ready"})
    os.kill(folder.engines["a"].child.pid, signal.SIGKILL)
    settle(folder, lambda: states(folder) == {"a": "exited"})
    folder.sync()
    [seen] = provisioner.observe()
    assert (seen.state, seen.exit_code, seen.error) == ("exited", -9, "")  # its last line says how it began
    provisioner.stop("a", 0.0)
    settle(folder, lambda: states(folder) == {})


def test_an_engine_that_hangs_is_unhealthy_until_it_answers(folder, monkeypatch):
    for name, value in (("EVERY_S", 0.1), ("CHECK_S", 0.3), ("UNHEALTHY_S", 1.0)):
        monkeypatch.setattr(health_watch, name, value)
    provisioner = ProcessProvisioner(folder.folder)
    provisioner.start("a", FAST)
    settle(folder, lambda: states(folder) == {"a": "ready"})
    pid = folder.engines["a"].child.pid
    os.kill(pid, signal.SIGSTOP)
    settle(folder, lambda: states(folder) == {"a": "unhealthy"})
    [seen] = provisioner.observe()
    assert (seen.pid, seen.error) == (pid, "GET /health has not been answered with status 200 for 1 s")
    os.kill(pid, signal.SIGCONT)
    settle(folder, lambda: states(folder) == {"a": "ready"})
    [seen] = provisioner.observe()
    assert (seen.pid, seen.error) == (pid, "")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("2026-11-23 22:34:47,667 INFO workers.engine listening on 8101\n", ""),
        ("ValueError: x\n2026-11-23 22:34:47,667 WARNING workers.engine slow\n", ""),  # who knows how long ago
        ("2026-11-23 22:34:47,667 ERROR workers.engine rank 1 was killed\n", "rank 1 was killed"),
        ("Traceback (most recent call last):\n  x\nMemoryError\n", "MemoryError"),
    ],
)
def test_an_error_is_the_last_line_that_is_one(tmp_path, log, said):
    path = tmp_path / "engine.log"
    path.write_text(log)
    assert last_error(path) == said


def test_a_start_that_fails_reports_why(folder):
    ProcessProvisioner(folder.folder).start("a", {"profile": "no-such-profile"})
    settle(folder, lambda: states(folder) == {"a": "exited"})
    [seen] = ProcessProvisioner(folder.folder).observe()
    assert "no-such-profile" in seen.error


def test_a_spec_that_is_no_json_is_reported_as_exited(folder):
    (folder.folder / "a.desired.json").write_text("{")
    folder.sync()
    assert states(folder) == {"a": "exited"}


def test_specs_outlive_the_supervisor(folder, tmp_path):
    ProcessProvisioner(folder.folder).start("a", FAST)
    settle(folder, lambda: states(folder) == {"a": "ready"})
    folder.stop_all(lambda: False)
    again = EngineFolder(folder.folder, tmp_path, dict(os.environ))
    try:
        settle(again, lambda: states(again) == {"a": "ready"})
        assert len(ProcessProvisioner(folder.folder).observe()) == 1
    finally:
        again.stop_all(lambda: True)


def test_a_folder_of_a_former_version_keeps_its_fleet(tmp_path):
    (tmp_path / "a.wish.json").write_text("{}")
    EngineFolder(tmp_path, tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["a.desired.json"]
