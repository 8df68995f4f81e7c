"""Every setting is refused before anything starts on it: one line that names the variable and what is valid."""

import json
import os
import subprocess
import sys

import pytest

from controller.core.errors import ConfigError
from controller.dispatch import build_dispatcher
from workers.settings_check import REFUSED, require_dispatcher
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"dispatch": {"nope": 1}}, "dispatch has no setting 'nope'; valid: engine_rank, "),
        ({"nope": {}}, "unknown part 'nope'; valid: dispatch, ordering"),
        ({"dispatch": 1}, "dispatch must be a mapping"),
        ({"dispatch": {"max_queue": "many"}}, "dispatch.max_queue must be a whole number"),
        ({"dispatch": {"max_queue": True}}, "dispatch.max_queue must be a whole number"),
        ({"dispatch": {"refuse_infeasible": 1}}, "dispatch.refuse_infeasible must be true or false"),
        ({"pacing": {"share": float("nan")}}, "pacing.share must be a number"),
        ({"pacing": {"share": 2}}, r"share must lie in \(0, 1\]"),
        ({"ordering": {"name": "nope"}}, "unknown ordering 'nope'; valid: apparent_tardiness_cost"),
        ({"ordering": {"name": ["nope"]}}, "ordering.name must be text"),
        ({"migrator": {"hold_s": "long"}}, "migrator.hold_s must be a number"),
        ({"ordering": {"name": "shortest_job_first", "by": "nope"}}, "by: unknown 'nope'; valid: prefill, service"),
    ],
)
def test_overrides_that_build_no_dispatcher_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=f"^DISPATCH_OVERRIDES: .*{said}") as error:
        require_dispatcher("slackline", overrides)
    assert "\n" not in str(error.value)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"^DISPATCH_POLICY: .*'nope'; valid: .*round_robin.*slackline"):
        require_dispatcher("nope", {})


def test_what_can_be_built_is_taken():
    overrides = {"pacing": {"window": 12}, "dispatch": {"infeasible_margin": 2}}
    assert require_dispatcher("edf_window", overrides) is None
    assert build_dispatcher("edf_window", overrides).config.infeasible_margin == 2


def run(tmp_path, module, *arguments, **told):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_", "REDIS_"))}
    ports = {"GATEWAY_PORT": str(free_port()), "CONSOLE_PORT": str(free_port())}
    environ = {
        **kept,
        "DATA_DIR": str(tmp_path / "data"),
        **ports,
        "DJANGO_SETTINGS_MODULE": "console.settings",
        **told,
    }
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


NOPE = json.dumps({"dispatch": {"nope": 1}})
REFUSALS = [
    ({"DISPATCH_POLICY": "nope"}, "DISPATCH_POLICY: unknown policy set 'nope'; valid: aladdin"),
    ({"DISPATCH_OVERRIDES": NOPE}, "DISPATCH_OVERRIDES: dispatch has no setting 'nope'; valid: engine_rank"),
    ({"TELEMETRY_PERIOD_S": "6"}, "TELEMETRY_PERIOD_S='6': expected 0.05 to 5"),
    ({"DRAIN_TIMEOUT_S": "0"}, "DRAIN_TIMEOUT_S='0': expected 1 to 86400"),
    ({"LOG_LEVEL": "LOUD"}, "LOG_LEVEL='LOUD': expected one of DEBUG, INFO"),
    ({"SECRET_KEY": "short"}, "SECRET_KEY: shorter than 32 characters"),
]
NAMES = ["policy", "overrides", "period", "drain", "level", "secret"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("told", "said"), REFUSALS, ids=NAMES)
def test_up_refuses_before_any_server_starts(tmp_path, told, said):
    done = run(tmp_path, "workers.supervisor", "up", **told)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"make up: {said}")
    assert done.stdout == ""
    assert not (tmp_path / "data" / "postgres").exists()


@pytest.mark.parametrize(("told", "said"), REFUSALS[:3], ids=NAMES[:3])
def test_a_gateway_alone_refuses_before_it_listens(tmp_path, told, said):
    done = run(tmp_path, "api.openai", "--port", str(free_port()), **told)
    assert done.returncode == REFUSED
    [line] = done.stderr.splitlines()
    assert line.startswith(f"gateway: {said}")


def test_a_data_folder_that_cannot_be_is_refused_by_name(tmp_path):
    (tmp_path / "data").write_text("no folder")
    done = run(tmp_path, "workers.supervisor", "up")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("make up: DATA_DIR: ")


def test_given_servers_must_answer_before_one_of_ours_starts(tmp_path):
    done = run(tmp_path, "workers.supervisor", "up", REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert done.stderr.startswith("make up: REDIS_URL: ")
    assert not (tmp_path / "data" / "postgres").exists()
