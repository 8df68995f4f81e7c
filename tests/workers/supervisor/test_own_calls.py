"""The supervisor's calls carry keys of engines and the token of the metrics: nobody else on the way gets them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from workers.supervisor.announce import fetch
from workers.supervisor.engine_processes import _healthy
from workers.supervisor.ports import free_port

KEY = {"Authorization": "Bearer the-key"}


@pytest.fixture
def listener():
    """Answers everything with `status`; `heard` has the headers that it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            listening.heard.append(self.headers.get("Authorization"))
            self.send_response(listening.status)
            self.send_header("Location", listening.location)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *told):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    listening.heard, listening.status, listening.location = [], 200, ""
    listening.url = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield listening
    listening.shutdown()
    listening.server_close()


def test_they_use_no_proxy_of_the_environment(listener, monkeypatch):
    monkeypatch.setenv("http_proxy", listener.url)
    monkeypatch.delenv("no_proxy", raising=False)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert not _healthy(f"{nobody}/health", KEY), "a proxy that answers is no engine"
    assert fetch(f"{nobody}/healthz", headers=KEY) == (0, {})
    assert listener.heard == []


def test_they_reach_their_process_behind_a_proxy(listener, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert _healthy(f"{listener.url}/health", KEY)
    assert fetch(f"{listener.url}/healthz", headers=KEY) == (200, {})
    assert listener.heard == [KEY["Authorization"]] * 2


def test_they_follow_no_redirect(listener):
    listener.status, listener.location = 302, f"{listener.url}/elsewhere"
    assert not _healthy(f"{listener.url}/health", KEY)
    assert fetch(f"{listener.url}/healthz", headers=KEY) == (302, {})
    assert len(listener.heard) == 2
