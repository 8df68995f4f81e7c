"""What `make up` accepts by environment, and how it refuses the rest."""

import pytest

from controller.core.errors import ConfigError
from workers.supervisor.settings import SECRETS, kept_secret, settings_from


def test_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_from({})
    assert (settings.gateway_port, settings.console_port, settings.demo_load) == (8080, 8000, True)
    assert settings.data_dir == tmp_path / ".data"
    assert settings.database_url is None


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
