"""What `make up` accepts by environment, and how it refuses the rest."""

import json
import re

import pytest

from console.environment import Environment
from console.management import demo
from controller.core.errors import ConfigError
from workers.environment import read_variable
from workers.supervisor import announce, plan
from workers.supervisor.settings import SECRETS, kept_secret, settings_from


def test_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_from({})
    assert (settings.gateway_port, settings.console_port, settings.demo_load) == (8080, 8000, True)
    assert settings.data_dir == tmp_path / ".data"
    assert settings.database_url is None
    assert (settings.gateway_url, settings.console_url) == ("http://127.0.0.1:8080", "http://127.0.0.1:8000")


def test_all_by_environment(tmp_path):
    environ = {"GATEWAY_PORT": "1", "CONSOLE_PORT": "2", "DATA_DIR": str(tmp_path), "DEMO_LOAD": "0", "REDIS_URL": "r"}
    settings = settings_from(environ)
    assert (settings.gateway_port, settings.console_port, settings.demo_load, settings.redis_url) == (1, 2, False, "r")


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"GATEWAY_PORT": "eighty"}, "GATEWAY_PORT"),
        ({"CONSOLE_PORT": "70000"}, "CONSOLE_PORT"),
        ({"GATEWAY_PORT": "8000"}, "GATEWAY_PORT"),  # the console's
        ({"DEMO_LOAD": "maybe"}, "DEMO_LOAD"),
        ({"DATABASE_URL_FILE": "/nowhere"}, "DATABASE_URL_FILE"),
        ({"FLOW_POLICY": "mf"}, "FLOW_POLICY"),
        ({"FLOW_LINK_GBPS": "-1"}, "FLOW_LINK_GBPS"),
        ({"ALLOWED_HOSTS": "slackline.example, localhost"}, "ALLOWED_HOSTS"),
    ],
)
def test_nonsense_is_refused_by_name(environ, field):
    with pytest.raises(ConfigError, match=field) as error:
        settings_from(environ)
    assert error.value.field == field


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_made_once_for_its_owner_only(tmp_path, name):
    first = kept_secret(name, tmp_path, {})
    assert len(first) > 40
    assert kept_secret(name, tmp_path, {}) == first
    assert (tmp_path / name.lower()).stat().st_mode & 0o077 == 0
    assert kept_secret(name, tmp_path, {name: "given"}) == "given"


def test_all_processes_go_by_the_same_files(tmp_path):
    """Mounted secrets: what the supervisor reads, what Django reads and what an engine reads is one value."""
    said = {
        "DATABASE_URL": "postgresql://slackline:secret@db:5432/slackline",
        "GATEWAY_PORT": "18080",
        "SECRET_KEY": "k" * 40,
        "FLEET_TOKEN": "from-a-file",
    }
    environ = {"REDIS_URL": "redis://cache:6379/0", "FLEET_TOKEN": "another", "LOG_LEVEL_FILE": "/kept/as/it/is"}
    for name, value in said.items():
        (tmp_path / name).write_text(f"{value}\n")
        environ[f"{name}_FILE"] = str(tmp_path / name)
    settings = settings_from(environ)
    assert (settings.database_url, settings.gateway_port) == (said["DATABASE_URL"], 18080)
    secrets = {name: kept_secret(name, tmp_path, environ) for name in SECRETS}
    before = plan.known_environment(settings, secrets, environ)
    after = plan.environment(settings, settings.database_url, "redis://cache:6379/0", secrets, environ)
    for env in (before, after):
        assert {name: Environment(env).text(name, "") for name in said} == said
        assert {name: read_variable(env, name) for name in said} == said
    assert [name for name in after if name.endswith("_FILE")] == ["LOG_LEVEL_FILE"]
    assert not [path for name in SECRETS if (path := tmp_path / name.lower()).exists()], "made beside what is given"


@pytest.mark.parametrize(("environ", "level"), [({}, "INFO"), ({"LOG_LEVEL": "DEBUG"}, "DEBUG")])
def test_workers_and_beat_log_at_the_level_that_is_asked_for(tmp_path, environ, level):
    specs = plan.processes(settings_from({"DATA_DIR": str(tmp_path)}), environ)
    told = {spec.name: spec.argv[spec.argv.index("-l") + 1] for spec in specs if "celery" in spec.argv}
    assert told == dict.fromkeys(("worker", "analysis", "pruning", "beat"), level)


def test_addresses_behind_a_proxy_are_kept(tmp_path, capsys):
    environ = {"CONSOLE_URL": "https://slackline.example/", "GATEWAY_URL": "https://llm.example", "GATEWAY_PORT": "81"}
    settings = settings_from({**environ, "DATA_DIR": str(tmp_path), "ALLOWED_HOSTS": "slackline.example, 127.0.0.1"})
    told = plan.known_environment(settings, {}, environ)
    assert (told["CONSOLE_URL"], told["GATEWAY_URL"]) == ("https://slackline.example", "https://llm.example")
    announce.welcome(settings)
    said = capsys.readouterr().out
    assert "https://slackline.example    login" in said
    assert "curl https://llm.example/v1/completions" in said
    (load,) = plan.when_ready(settings, told)
    assert load.argv[-2:] == ("--url", "http://127.0.0.1:81"), "the demo load goes past the proxy"


@pytest.mark.parametrize(("database", "shown"), [(None, True), ("postgresql://slack:pw@db.example/slackline", False)])
def test_secrets_stay_in_their_file_where_the_database_is_not_our_own(tmp_path, capsys, database, shown):
    settings = settings_from({"DATA_DIR": str(tmp_path), **({"DATABASE_URL": database} if database else {})})
    known = {"operator": "operator", "operator_password": "a-password", "api_key": "sk-a-key"}
    (tmp_path / "credentials.json").write_text(json.dumps(known))
    announce.welcome(settings)
    said = capsys.readouterr().out
    assert {"a-password" in said, "sk-a-key" in said} == {shown}
    assert (str(tmp_path / "credentials.json") in said) is not shown
    seed = plan.seed(settings, {}, tmp_path / "log")
    assert ("--demo" in seed.argv) is shown, "the key that is printed in the documentation"


def test_the_request_to_try_is_for_the_model_that_was_named_and_waits_for_its_engine(tmp_path, capsys):
    (tmp_path / "credentials.json").write_text(json.dumps({"model": "demo"}))
    for named, asked in (({}, {"model": "demo"}), ({"MODEL": "models/tiny/"}, {"model": "tiny", "waiting_time": 600})):
        announce.welcome(settings_from({"DATA_DIR": str(tmp_path), **named}))
        said = capsys.readouterr().out
        body = re.search(r"-d '(.*)'", said)
        assert body is not None
        assert json.loads(body.group(1)) == {"prompt": "Hello", "max_tokens": 16, **asked}
        assert ("The engine of tiny may still be starting" in said) is bool(named)


@pytest.mark.parametrize("policy", [{}, {"FLOW_POLICY": "mfs"}])
def test_the_transfer_daemon_runs_whatever_the_policy_is_now(tmp_path, policy):
    """It may be changed in the console later."""
    settings = settings_from({"DATA_DIR": str(tmp_path), **policy})
    first = plan.processes(settings, {})[0]
    assert (first.name, *first.argv[-1:]) == ("flowd", "workers.flowd")
    assert "flowd" in plan.STOP_ORDER[-1]
    assert plan.known_environment(settings, {}, {})["FLOW_SOCKET"] == str(tmp_path / "flowd.sock")


@pytest.mark.parametrize("base", [{}, {"FLOW_HOST": "gpu-1"}])
def test_the_transfer_daemon_names_its_host_as_the_fleet_does(tmp_path, base):
    settings = settings_from({"DATA_DIR": str(tmp_path)})
    assert plan.known_environment(settings, {}, base)["FLOW_HOST"] == demo.HOST


def test_where_its_socket_has_too_long_a_path_there_is_none(tmp_path):
    long = {"DATA_DIR": str(tmp_path / ("x" * 120))}
    settings = settings_from(long)
    assert "flowd" not in [spec.name for spec in plan.processes(settings, {})]
    assert "FLOW_SOCKET" not in plan.known_environment(settings, {}, {})
    with pytest.raises(ConfigError, match="FLOW_SOCKET"):
        settings_from({**long, "FLOW_POLICY": "mfs"})
