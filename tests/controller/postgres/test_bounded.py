"""A server that hangs costs a bounded time, and its connection is never used again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.db import OperationalError, connections

from controller.postgres.base import DatabaseWrapper
from controller.postgres.bounded import BoundedConnection, ServerHangs
from workers.supervisor.embedded import EmbeddedPostgres

pytestmark = pytest.mark.db


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, service_dir: Path) -> Iterator[EmbeddedPostgres]:
    own = EmbeddedPostgres(service_dir / "bounded", options={"fsync": "off"})
    own.start()
    yield own
    own.stop()


@pytest.fixture
def connection(server: EmbeddedPostgres) -> Iterator[BoundedConnection]:
    with BoundedConnection.connect(server.url, autocommit=True) as opened:
        opened.patience_s = 0.5
        yield opened


def test_a_statement_within_its_time_is_answered(connection):
    assert connection.execute("SELECT pg_sleep(0.2), 7").fetchone()[1] == 7


def test_a_slow_statement_is_given_up_and_the_connection_closed(connection):
    with pytest.raises(ServerHangs, match=r"0\.5 s"):
        connection.execute("SELECT pg_sleep(3)")

    assert connection.closed
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")


def test_a_stopped_server_costs_its_patience_alone(connection):
    backend = connection.info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(ServerHangs):
            connection.execute("SELECT 1")
    finally:
        os.kill(backend, signal.SIGCONT)

    assert 0.4 < time.monotonic() - started < 2.0


def test_a_copy_that_gets_no_answer_is_given_up(connection):
    connection.execute("CREATE TEMPORARY TABLE numbers (number int)")
    backend = connection.info.backend_pid

    def copy() -> None:
        with connection.cursor().copy("COPY numbers FROM STDIN") as copy:
            os.kill(backend, signal.SIGSTOP)
            copy.write_row([1])

    try:
        with pytest.raises(psycopg.OperationalError):
            copy()
    finally:
        os.kill(backend, signal.SIGCONT)
    assert connection.closed


@pytest.mark.django_db
def test_django_uses_such_connections():
    from django.db import connection as django_connection

    with django_connection.cursor() as cursor:
        cursor.execute("SELECT 1")

    assert isinstance(django_connection.connection, BoundedConnection)


@pytest.mark.usefixtures("db")
def test_connections_from_djangos_pool_are_bounded_too(server):
    plain = connections["default"].settings_dict
    place = {"HOST": "127.0.0.1", "PORT": server.port, "NAME": "slackline"}
    wrapper = DatabaseWrapper({**plain, **place, "CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 1}}}, "pooled")
    try:
        wrapper.ensure_connection()
        assert isinstance(wrapper.connection, BoundedConnection)
    finally:
        wrapper.close()
        wrapper.close_pool()


@pytest.mark.usefixtures("db")
def test_a_page_does_not_hang_with_the_server(server):
    own = {"HOST": "127.0.0.1", "PORT": server.port, "NAME": "slackline", "CONN_HEALTH_CHECKS": True}
    pool = {"pool": {"min_size": 1, "max_size": 1, "timeout": 0.5}}
    pooled = DatabaseWrapper({**connections["default"].settings_dict, **own, "OPTIONS": pool}, alias="pooled")
    pooled.inc_thread_sharing()

    def ask() -> int:
        try:
            with pooled.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                return cursor.fetchone()[0]
        finally:
            pooled.close()

    backend = ask()
    assert ask() == backend
    before, BoundedConnection.patience_s = BoundedConnection.patience_s, 0.5
    os.kill(backend, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(OperationalError):
            ask()
        assert time.monotonic() - started < 3.0
    finally:
        os.kill(backend, signal.SIGCONT)
        BoundedConnection.patience_s = before
        pooled.close_pool()
