"""Registered endpoints, against a real HTTP server on loopback."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from controller.core.errors import ConfigError
from workers.actions.parallel_calls import LoopCalls
from workers.provisioners import Endpoint, StaticProvisioner, Watch, static
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


def test_one_that_no_one_listens_on_is_gone_and_the_others_are_seen(endpoint):
    seen = StaticProvisioner({"a": f"http://127.0.0.1:{free_port()}", "b": endpoint.url}).observe()
    assert [(o.id, o.state) for o in seen] == [("a", "exited"), ("b", "ready")]
    assert "ConnectionError" in seen[0].error


class Kept(BaseHTTPRequestHandler):
    """Keeps its connections, as uvicorn does. `server.closes`: closes each after an answer, without saying so."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = self.server.closes

    def log_message(self, *args):
        return


class Restarted(ThreadingHTTPServer):
    """`go` ends it with all its connections; another one listens at the same URL then."""

    daemon_threads = True

    def __init__(self, port=0):
        self.status, self.asked, self.closes, self.connected = 200, 0, False, []
        super().__init__(("127.0.0.1", port), Kept)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def process_request(self, request, client_address):
        self.connected.append(request)
        super().process_request(request, client_address)

    def go(self):
        self.shutdown()
        self.server_close()
        for each in self.connected:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_observer_keep_their_connections():
    engine, watch = Restarted(), Watch()
    for _ in range(5):
        [seen] = StaticProvisioner({"a": engine.url}, watch).observe()
        assert seen.state == "ready"
    assert (engine.asked, len(engine.connected)) == (5, 1)
    engine.go()


def test_one_that_was_started_again_at_the_same_url_is_ready_at_once():
    engine, watch = Restarted(), Watch()
    for _ in range(3):
        [seen] = StaticProvisioner({"a": engine.url}, watch).observe()
        assert seen.state == "ready"
        engine.go()
        engine = Restarted(engine.server_port)
    engine.go()
    [seen] = StaticProvisioner({"a": engine.url}, watch).observe()
    assert (seen.state, seen.error) == ("exited", f"ConnectionError at {engine.url}/health")


def test_one_that_closes_connections_between_looks_stays_ready():
    engine, watch = Restarted(), Watch()
    engine.closes = True
    for _ in range(50):
        [seen] = StaticProvisioner({"a": engine.url}, watch).observe()
        assert seen.state == "ready"
    assert engine.asked == 50
    engine.go()


class NoHttp:
    """Listens and answers with something else than HTTP, or with nothing at all."""

    def __init__(self, answer: bytes) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self.socket.accept()
                if self.answer:
                    connected.sendall(self.answer)
                    connected.close()
                else:
                    threading.Timer(3.0, connected.close).start()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_what_listens_at_a_url_that_never_was_an_engine_is_not_told(endpoint, sglang, backend):
    """Whoever may register instances would have a scanner of ports and paths: closed, silent, another protocol, and
    each status look the same."""
    redis, silent = NoHttp(b"-ERR unknown command\r\n"), NoHttp(b"")
    urls = [f"http://127.0.0.1:{free_port()}", redis.url, silent.url, "http://no-such-host.invalid", "http://8.8.8.8"]
    endpoints = {f"u{n}": Endpoint(url, backend, known=False) for n, url in enumerate(urls)}
    seen = [(each.state, each.error) for each in StaticProvisioner(endpoints).observe()]
    for status in (302, 401, 404, 500, 503):
        endpoint.status = status
        seen += [
            (each.state, each.error)
            for each in StaticProvisioner({"e": Endpoint(endpoint.url, backend, known=False)}).observe()
        ]
    sglang.info = {"disaggregation_mode": "secret-of-this-service"}
    seen += [
        (each.state, each.error)
        for each in StaticProvisioner({"s": Endpoint(sglang.url, backend, "prefill", known=False)}).observe()
    ]
    assert set(seen) == {("exited", static.UNPROVEN)}
    redis.socket.close()
    silent.socket.close()


def test_the_log_of_the_worker_says_what_was_there_once(endpoint, caplog):
    endpoint.status = 418
    for _ in range(3):
        StaticProvisioner({"teapot": Endpoint(endpoint.url, known=False)}).observe()
    assert [each.getMessage() for each in caplog.records if "418" in each.getMessage()] == [
        f"instance teapot: status 418 at {endpoint.url}/health"
    ]


def test_one_that_was_ready_before_says_what_is_wrong(endpoint):
    endpoint.status = 503
    [seen] = StaticProvisioner({"a": Endpoint(endpoint.url, known=True)}).observe()
    assert (seen.state, seen.error) == ("starting", f"status 503 at {endpoint.url}/health")


def test_a_hundred_that_hang_do_not_hide_the_others(endpoint, monkeypatch):
    """What was seen of them stays until they answer or fail, and none of them is waited for alone."""
    look = static._look

    async def hangs(id, each):
        if id.startswith("h"):
            await asyncio.sleep(0.3)
            raise requests.ConnectTimeout("no answer")
        return await look(id, each)

    monkeypatch.setattr(static, "_look", hangs)
    monkeypatch.setattr(static, "ASK_S", 0.5)
    watch, slowest = Watch(), 0.0
    endpoints = {"a": endpoint.url, **{f"h{n}": f"http://127.0.0.1:{n + 1}" for n in range(100)}}
    for _ in range(60):
        began = time.monotonic()
        seen = {each.id: each for each in StaticProvisioner(endpoints, watch).observe()}
        slowest = max(slowest, time.monotonic() - began)
        assert seen.keys() == endpoints.keys(), "one that is not listed would be taken for gone"
        if all(seen[id].state == ("ready" if id == "a" else "exited") for id in seen):
            break
    assert seen["a"].state == "ready"
    assert {each.state for id, each in seen.items() if id != "a"} == {"exited"}
    assert seen["h7"].error == "no answer"
    assert slowest < 100 * 0.3, "not one after the other"


def test_one_that_has_not_answered_yet_is_starting_and_then_what_it_was(endpoint, monkeypatch):
    watch = Watch(LoopCalls(patience_s=60.0))
    assert [each.state for each in StaticProvisioner({"a": endpoint.url}, watch).observe()] == ["ready"]
    gate = threading.Event()
    monkeypatch.setattr(static, "_look", lambda id, each: asyncio.to_thread(gate.wait))
    monkeypatch.setattr(static, "ASK_S", 0.1)
    seen = StaticProvisioner({"a": endpoint.url, "b": "http://127.0.0.1:9"}, watch).observe()
    gate.set()
    assert [(each.id, each.state) for each in seen] == [("a", "ready"), ("b", "starting")]
    assert seen[1].error == "the server has not responded yet"


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
    assert wrong.error == "the server runs as decode (disaggregation_mode decode) but is registered as collocated"
    sglang.info = {"disaggregation_mode": "null"}
    [unified] = StaticProvisioner({"s": Endpoint(sglang.url, "sglang", "collocated")}).observe()
    assert unified.state == "ready"


@pytest.fixture
def vllm():
    """A server whose /server_info is `.info`; None: not in development mode."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            info = self.path == "/server_info?config_format=json"
            self.send_response(200 if self.path == "/health" or (info and self.server.info is not None) else 404)
            self.end_headers()
            self.wfile.write(json.dumps(self.server.info).encode() if info else b"")

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.info = {"vllm_config": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def seen_with(server, kv_role):
    [seen] = StaticProvisioner({"v": Endpoint(server.url, "vllm", "prefill", kv_role)}).observe()
    return seen.state, seen.error


def test_a_vllm_that_was_started_for_other_sides_says_so_where_it_tells(vllm):
    assert seen_with(vllm, "kv_both") == ("ready", "")
    assert seen_with(vllm, "kv_producer") == (
        "starting", "the server was started with kv_role kv_both but is registered with kv_producer",
    )  # fmt: skip
    vllm.info = {"vllm_config": {"kv_transfer_config": None}}
    assert seen_with(vllm, "kv_both") == (
        "starting", "the server was started with kv_role None but is registered with kv_both",
    )  # fmt: skip
    assert seen_with(vllm, "") == ("ready", ""), "nothing was said that could be wrong"
    vllm.info = {"another": "page"}
    assert seen_with(vllm, "kv_both") == ("starting", f"KeyError at {vllm.url}/server_info")


def test_a_vllm_that_does_not_tell_is_believed(vllm):
    vllm.info = None
    assert seen_with(vllm, "kv_both") == ("ready", "")
