"""Desired-state files: what the provisioner writes and reads, and that saying things twice changes nothing."""

import json

import pytest

from controller.core.errors import ConfigError
from controller.scale.provisioning import DECLARED
from workers.provisioners import PROVISIONERS, ProcessProvisioner

SPEC = {"profile": "constant:5ms", "seed": 3}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "engines").mkdir()
    return tmp_path / "engines"


def state(folder, id, **fields):
    (folder / f"{id}.state.json").write_text(json.dumps({"id": id, **fields}))


def test_a_start_sets_the_desired_state_and_waits_for_the_supervisor(folder):
    provisioner = ProcessProvisioner(folder)
    provisioner.start("a", SPEC)
    assert json.loads((folder / "a.desired.json").read_text()) == SPEC
    [seen] = provisioner.observe()
    assert (seen.id, seen.state, seen.started_at) == ("a", "pending", None)
    assert seen.error == "waits for the supervisor of make up to start it"


def test_starting_twice_keeps_the_first_spec(folder):
    provisioner = ProcessProvisioner(folder)
    provisioner.start("a", SPEC)
    provisioner.start("a", {"profile": "constant:9ms"})
    assert json.loads((folder / "a.desired.json").read_text()) == SPEC


def test_the_supervisors_answer_is_what_is_observed(folder):
    provisioner = ProcessProvisioner(folder)
    provisioner.start("a", SPEC)
    state(folder, "a", state="exited", pid=7, url="http://127.0.0.1:1", started_at=5.0, exit_code=-9, error="gone")
    [seen] = provisioner.observe()
    assert (seen.state, seen.exit_code, seen.error, seen.url) == ("exited", -9, "gone", "http://127.0.0.1:1")


def test_stop_gives_its_grace_period_and_removes_the_spec(folder):
    provisioner = ProcessProvisioner(folder)
    provisioner.start("a", SPEC)
    provisioner.stop("a", 4.5)
    provisioner.stop("a", 9.0)
    assert not (folder / "a.desired.json").exists()
    assert json.loads((folder / "a.stop.json").read_text()) == {"grace_s": 4.5}


def test_stopping_what_is_gone_leaves_nothing(folder):
    ProcessProvisioner(folder).stop("a", 1.0)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("id", ["../a", "", "a/b", ".hidden", "a..b", "x" * 64])
def test_an_id_that_could_be_a_path_is_refused(folder, id):
    with pytest.raises(ConfigError) as error:
        ProcessProvisioner(folder).start(id, SPEC)
    assert error.value.field == "id"


def test_without_a_supervisors_folder_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="make up"):
        ProcessProvisioner(tmp_path / "none").start("a", SPEC)


def test_a_folder_that_is_gone_is_not_an_empty_fleet(folder):
    provisioner = ProcessProvisioner(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match="engines"):
        provisioner.observe()


def test_every_provisioner_that_is_declared_is_implemented():
    assert list(PROVISIONERS) == list(DECLARED)
