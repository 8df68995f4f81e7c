"""An outage is found out once; a probe ends it; busy connections are no outage."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from django.db import OperationalError, connections

from controller.postgres.base import DatabaseWrapper
from controller.postgres.circuit import Circuit, CircuitOpen
from workers.supervisor.embedded import EmbeddedPostgres


class Server:
    """Away until told otherwise; counts probes and restorations."""

    def __init__(self):
        self.away, self.probes, self.restored = True, 0, 0
        self.back = threading.Event()

    def probe(self):
        self.probes += 1
        if self.away:
            raise psycopg.OperationalError("refused")

    def restore(self):
        self.restored += 1
        self.back.set()


def closed(circuit, within_s=5.0):
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        try:
            circuit.check()
        except CircuitOpen:
            time.sleep(0.005)
        else:
            return True
    return False


def test_it_refuses_until_a_probe_has_connected():
    server = Server()
    circuit = Circuit(server.probe, server.restore, pause_s=0.01)
    circuit.check()
    circuit.failed()
    with pytest.raises(CircuitOpen):
        circuit.check()
    server.away = False
    assert server.back.wait(5)
    assert closed(circuit)
    circuit.check()
    assert server.restored == 1


def test_many_failures_start_one_probe():
    server = Server()
    circuit = Circuit(server.probe, server.restore, pause_s=0.01)
    before = set(threading.enumerate())  # another test's probe may be about to end
    for _ in range(20):
        circuit.failed()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == ["postgres-probe"]
    server.away = False
    assert closed(circuit)


def test_all_connections_busy_is_no_outage():
    server = Server()
    server.away = False
    circuit = Circuit(server.probe, server.restore, pause_s=0.01)
    circuit.failed()
    assert closed(circuit)
    assert (server.probes, server.restored) == (1, 0)


@pytest.mark.django_db
def test_pages_fail_fast_after_the_first_and_work_as_soon_as_it_is_back(service_dir, monkeypatch):
    server = EmbeddedPostgres(service_dir / "circuit", options={"fsync": "off"})
    server.start()
    monkeypatch.setattr(DatabaseWrapper, "_circuits", {})
    given = psycopg.conninfo.conninfo_to_dict(server.url)
    settings = dict(connections["default"].settings_dict) | {
        "NAME": given["dbname"], "HOST": given["host"], "PORT": given.get("port", ""), "USER": given["user"],
        "PASSWORD": "", "CONN_MAX_AGE": 0, "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {"pool": {"min_size": 1, "max_size": 4, "timeout": 0.5}},
    }  # fmt: skip

    def page():
        """A new wrapper over the shared pool, as each thread of the console has. Seconds it took."""
        wrapper, started = DatabaseWrapper(settings, alias="circuit-test"), time.monotonic()
        try:
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT 1")
        finally:
            wrapper.close()
        return time.monotonic() - started

    try:
        page()
        server.stop()
        with pytest.raises(OperationalError):
            page()
        started = time.monotonic()
        for _ in range(20):
            with pytest.raises(OperationalError):
                page()
        assert time.monotonic() - started < 0.5
        server.start()
        assert closed(DatabaseWrapper._circuits["circuit-test"])
        page()
    finally:
        server.stop()
        pool = DatabaseWrapper._connection_pools.pop("circuit-test", None)
        if pool is not None:
            pool.close(timeout=0)
