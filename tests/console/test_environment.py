"""The environment is refused where it is nonsense, with the variable's name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from console.environment import Environment, embedded_ports

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda env: env.flag("X", True), "maybe"),
        (lambda env: env.number("X", 1.0, 0.05, 5.0), "fast"),
        (lambda env: env.number("X", 1.0, 0.05, 5.0), "nan"),
        (lambda env: env.number("X", 1.0, 0.05, 5.0), "9"),
        (lambda env: env.whole("X", 1, 1, 10), "1.5"),
        (lambda env: env.choice("X", "a", ("a", "b")), "c"),
        (lambda env: env.url("X", "http://a", ("http",)), "ftp://a"),
        (lambda env: env.url("X", "http://a", ("http",)), "localhost"),
        (lambda env: env.database("X", ""), "mysql://host/name"),
        (lambda env: env.database("X", ""), "postgresql://host"),
        (lambda env: env.database("X", ""), "postgresql://host:port/name"),
        (lambda env: env.database("X", ""), "postgresql://host/name?sslmod=require"),
        (lambda env: env.mapping("X"), "[1]"),
        (lambda env: env.mapping("X"), "{"),
    ],
)
def test_nonsense_is_refused_by_name(read, value):
    with pytest.raises(ImproperlyConfigured, match=r"^X"):
        read(Environment({"X": value}))


def test_an_empty_value_counts_as_not_set():
    env = Environment({"A": "", "B": ""})

    assert env.flag("A", True) is True
    assert env.number("B", 1.5, 0, 2) == 1.5
    assert env.names("C", "x, y,") == ["x", "y"]


def test_a_database_url_is_taken_apart():
    env = Environment({"DATABASE_URL": "postgresql://us%40er:p%3Aw@db.example:6543/slack?sslmode=require"})

    assert env.database("DATABASE_URL", "") == {
        "NAME": "slack",
        "USER": "us@er",
        "PASSWORD": "p:w",
        "HOST": "db.example",
        "PORT": 6543,
        "OPTIONS": {"sslmode": "require"},
    }


@pytest.mark.parametrize("role", ["console", "gateway", "worker"])
def test_what_a_database_url_says_of_the_connection_is_added_to_and_not_replaced(role):
    url = "postgresql://me@db.example/slack?options=-csearch_path%3Dsl&connect_timeout=9&sslmode=require"
    read = "from django.conf import settings; print(settings.DATABASES['default']['OPTIONS'])"
    told = {"DATABASE_URL": url, "SLACKLINE_ROLE": role, "DJANGO_SETTINGS_MODULE": "console.settings"}
    environ = {**os.environ, **told}
    said = subprocess.run(
        [sys.executable, "-c", read], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    options = ast.literal_eval(said.stdout)
    assert (options["connect_timeout"], options["sslmode"]) == ("9", "require")
    assert options["options"].startswith("-csearch_path=sl")
    assert ("statement_timeout=5000" in options["options"]) == (role != "worker")


def test_a_secret_may_come_from_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("s" * 40 + "\n")

    assert Environment({"SECRET_KEY_FILE": str(path)}).text("SECRET_KEY", "") == "s" * 40


def test_a_secret_is_made_once_and_kept_private(tmp_path):
    path = tmp_path / "new" / "secret_key"

    made = Environment({}).secret("SECRET_KEY", path)

    assert len(made) >= 32
    assert Environment({}).secret("SECRET_KEY", path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert Environment({"SECRET_KEY": "g" * 32}).secret("SECRET_KEY", path) == "g" * 32


def test_a_short_secret_is_refused(tmp_path):
    with pytest.raises(ImproperlyConfigured, match="SECRET_KEY"):
        Environment({"SECRET_KEY": "short"}).secret("SECRET_KEY", tmp_path / "x")
    (tmp_path / "kept").write_text("short")
    with pytest.raises(ImproperlyConfigured, match="kept"):
        Environment({}).secret("SECRET_KEY", tmp_path / "kept")


def test_a_password_in_a_url_is_not_repeated():
    with pytest.raises(ImproperlyConfigured, match=r"^X: expected postgresql") as error:
        Environment({"X": "mysql://user:hunter2@host/name"}).database("X", "")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("value", ["postgresql://us:hunter2/x@db:5432/s", "redis://:hunter2/0", "redis://:hunter2@"])
def test_a_part_of_a_password_is_not_repeated_either(value):
    with pytest.raises(ImproperlyConfigured) as refused:
        Environment({"X": value}).url("X", "", ("postgresql", "redis"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("value", ["http://host:99999", "http://host:port", "http://[::1"])
def test_a_url_that_cannot_be_read_is_refused_by_name(value):
    with pytest.raises(ImproperlyConfigured, match=r"^X=.*expected http://"):
        Environment({"X": value}).url("X", "", ("http",))


def test_a_file_or_folder_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ImproperlyConfigured, match=r"^X_FILE="):
        Environment({"X_FILE": str(tmp_path / "none")}).text("X", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(ImproperlyConfigured, match=r"^DATA_DIR: cannot keep X"):
        Environment({}).secret("X", tmp_path / "file" / "secret_key")


@pytest.mark.parametrize("content", [None, "", "[1]", '{"postgres": "x"}', "{"])
def test_without_embedded_servers_there_are_no_ports(tmp_path, content):
    if content is not None:
        (tmp_path / "ports.json").write_text(content)
    assert embedded_ports(tmp_path) == {}


@pytest.mark.parametrize(("role", "ports"), [("manage", (40001, 40002)), ("console", (5432, 6379))])
def test_a_command_finds_the_embedded_servers(tmp_path, role, ports):
    """Of a `make up` with the same folder; other processes are told by it, or by who starts them."""
    (tmp_path / "ports.json").write_text('{"gateway": 8080, "postgres": 40001, "redis": 40002}')
    read = "from console.settings import *; print(DATABASES['default']['PORT'], REDIS_URL.rpartition(':')[2])"
    told = {"PATH": os.environ["PATH"], "DATA_DIR": str(tmp_path), "SLACKLINE_ROLE": role}
    said = subprocess.run([sys.executable, "-c", read], env=told, capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.split() == [str(ports[0]), f"{ports[1]}/0"]


def test_dashboards_of_ray_clusters_are_no_engines(tmp_path):
    read = "from console.settings import ENGINE_NETWORKS as rules; print(*sorted(rules.own))"
    told = {"PATH": os.environ["PATH"], "DATA_DIR": str(tmp_path)}
    told |= {"RAY_ADDRESS": "east=http://10.0.0.1:8265, west=https://ray.example"}
    said = subprocess.run([sys.executable, "-c", read], env=told, capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.strip() == "('10.0.0.1', 8265) ('ray.example', 443)"


PRODUCTION = {"CONSOLE_URL": "https://slackline.example", "ALLOWED_HOSTS": "slackline.example,127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (PRODUCTION, set()),
        ({**PRODUCTION, "HTTPS_ONLY": "0"}, {"security.W004", "security.W008"}),
        ({"CONSOLE_URL": "http://slackline.example"}, {f"security.W0{n}" for n in ("04", "08", "11", "16")}),
    ],
)
def test_djangos_checks_of_a_deployment_are_clean_behind_https(tmp_path, environ, named):
    key = "".join(chr(33 + number) for number in range(60))
    env = {"PATH": os.environ["PATH"], "DATA_DIR": str(tmp_path), "SECRET_KEY": key, **environ}
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert set(re.findall(r"security\.W\d+", done.stderr)) == named, done.stderr
    assert (done.returncode == 0) is (not named)
