"""The table of limits in the documentation, and the settings that change them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from workers.http.limits import LIMITS, SETTINGS, HttpLimits, raise_file_limit, read_limits

PAGE = Path(__file__).parents[3] / "docs/reference/limits.md"
SERVERS = ("gateway", "console", "engine")


def table() -> dict[str, list[float]]:
    rows = re.findall(r"(?m)^\| `(HTTP_[A-Z_]+)` \| ([\d,.]+) \| ([\d,.]+) \| ([\d,.]+) \|", PAGE.read_text())
    return {name: [float(value.replace(",", "")) for value in values] for name, *values in rows}


def test_the_table_has_every_limit_of_every_server():
    assert list(LIMITS) == list(SERVERS)
    ours = {each.variable: [getattr(LIMITS[server], each.field) for server in SERVERS] for each in SETTINGS}
    assert table() == ours


def test_every_limit_has_a_setting():
    assert [each.field for each in SETTINGS] == [field.name for field in fields(HttpLimits)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.variable)
def test_each_setting_sets_its_limit_alone(setting):
    for server in SERVERS:
        changed = read_limits(server, {setting.variable: str(setting.low)})
        assert getattr(changed, setting.field) == setting.low
        assert sum(getattr(changed, f.name) != getattr(LIMITS[server], f.name) for f in fields(HttpLimits)) <= 1


@pytest.mark.parametrize("raw", ["x", "-1", "nan", "1e99", "0"])
@pytest.mark.parametrize("variable", ["HTTP_HEAD_S", "HTTP_HEAD_BYTES", "HTTP_CONNECTIONS"])
def test_nonsense_is_refused_by_name(variable, raw):
    with pytest.raises(ConfigError, match=f"{variable}=.*expected a .*number from"):
        read_limits("gateway", {variable: raw})


def test_connections_fit_the_limit_of_open_files(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (1_024, 1_024))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: None)
    limits = raise_file_limit(HttpLimits())
    assert (limits.connections, limits.connections_per_address) == (768, 768)
