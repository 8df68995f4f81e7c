"""When `make up` says that it is ready, and what it starts only then."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from workers.supervisor import announce, plan
from workers.supervisor.announce import Readiness, waiting_for
from workers.supervisor.settings import settings_from

WAITS = {"components": {"gateway": {"state": "ok"}, "engines": {"state": "down", "detail": "0 of 2 ready"}}}


class Console:
    """Answers /healthz as it is told."""

    def __init__(self):
        console = self
        self.status, self.body = 503, WAITS
        self.asked_with = None

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                console.asked_with = self.headers.get("Authorization")
                self.send_response(console.status)
                self.end_headers()
                self.wfile.write(json.dumps(console.body).encode())

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def console(monkeypatch):
    monkeypatch.setattr(announce, "ASK_EVERY_S", 0.0)
    made = Console()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_not_ready_before_an_engine_can_serve(console, monkeypatch, capsys):
    monkeypatch.setattr(announce, "REMIND_EVERY_S", -1.0)  # it is always time to
    readiness = Readiness(console.port)
    assert not readiness.became_ready()
    assert "engines: 0 of 2 ready" in capsys.readouterr().out
    console.status, console.body = 200, {"status": "degraded", "components": {"engines": {"state": "degraded"}}}
    assert not readiness.became_ready()
    console.body = {"status": "ok"}
    assert readiness.became_ready()
    assert not readiness.became_ready()  # said once


def test_the_console_is_asked_with_the_token_of_the_settings(console):
    settings = settings_from({"METRICS_TOKEN": "a-token-for-metrics"})
    assert "METRICS_TOKEN" in plan.known_environment(settings, {}, {})
    Readiness(console.port, token=settings.metrics_token).became_ready()
    assert console.asked_with == "Bearer a-token-for-metrics"
    Readiness(console.port).became_ready()
    assert console.asked_with is None


def test_not_ready_while_no_one_answers():
    readiness = Readiness(1)
    assert not readiness.became_ready()


def test_what_is_waited_for_is_named():
    assert waiting_for(WAITS) == "engines: 0 of 2 ready"
    assert waiting_for({}) == "unknown"


@pytest.mark.parametrize(("wanted", "started"), [("1", ["demo-load"]), ("0", [])])
def test_the_demo_load_starts_only_then(tmp_path, wanted, started):
    settings = settings_from({"DATA_DIR": str(tmp_path), "DEMO_LOAD": wanted})
    assert "demo-load" not in [spec.name for spec in plan.processes(settings, {})]
    assert [spec.name for spec in plan.when_ready(settings, {})] == started
