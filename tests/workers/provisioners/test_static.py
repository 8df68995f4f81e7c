"""Registered endpoints, against a real HTTP server on loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from controller.core.errors import ConfigError
from workers.provisioners import Endpoint, StaticProvisioner
from workers.supervisor.ports import free_port


@pytest.fixture
def endpoint():
    """`.status` is what /health answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.server.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.status = 200
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_healthy_endpoint_is_ready(endpoint):
    [seen] = StaticProvisioner({"a": endpoint.url}).observe()
    assert (seen.id, seen.state, seen.url) == ("a", "ready", endpoint.url)


def test_one_that_answers_503_is_starting(endpoint):
    endpoint.status = 503
    [seen] = StaticProvisioner({"a": endpoint.url + "/"}).observe()
    assert seen.state == "starting"
    assert "503" in seen.error


def test_one_that_nobody_listens_on_is_gone_and_the_others_are_seen(endpoint):
    seen = StaticProvisioner({"a": f"http://127.0.0.1:{free_port()}", "b": endpoint.url}).observe()
    assert [(o.id, o.state) for o in seen] == [("a", "exited"), ("b", "ready")]
    assert "ConnectionError" in seen[0].error


def test_registering_and_forgetting(endpoint):
    provisioner = StaticProvisioner({})
    assert provisioner.observe() == []
    provisioner.start("a", {"url": endpoint.url})
    assert [o.state for o in provisioner.observe()] == ["ready"]
    provisioner.stop("a", 0)
    provisioner.stop("a", 0)
    assert provisioner.observe() == []


@pytest.mark.parametrize("url", [None, "", "127.0.0.1:80", 7])
def test_a_static_instance_needs_its_url(url):
    with pytest.raises(ConfigError) as error:
        StaticProvisioner({}).start("a", {"url": url})
    assert error.value.field == "url"


@pytest.fixture
def sglang():
    """A server that answers /model_info, and says of its role what `.info` is; it fails on /health."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            known = {"/model_info": {}, "/server_info": self.server.info}
            self.send_response(200 if self.path in known else 503)
            self.end_headers()
            self.wfile.write(json.dumps(known.get(self.path, {})).encode())

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.info = {"disaggregation_mode": "prefill", "internal_states": [{"disaggregation_mode": "decode"}]}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_sglang_is_asked_what_costs_no_token(sglang):
    [seen] = StaticProvisioner({"s": Endpoint(sglang.url, "sglang")}).observe()
    assert (seen.state, seen.error) == ("ready", "")


def test_one_that_joins_in_another_role_says_so(sglang):
    [right] = StaticProvisioner({"s": Endpoint(sglang.url, "sglang", "decode")}).observe()
    [wrong] = StaticProvisioner({"s": Endpoint(sglang.url, "sglang", "collocated")}).observe()
    assert (right.state, wrong.state) == ("ready", "starting")
    assert wrong.error == "it runs as decode (disaggregation_mode decode) and is registered as collocated"
    sglang.info = {"disaggregation_mode": "null"}
    [unified] = StaticProvisioner({"s": Endpoint(sglang.url, "sglang", "collocated")}).observe()
    assert unified.state == "ready"
