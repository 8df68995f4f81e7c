"""Engines that are none: names that resolve to elsewhere, redirects, answers without an end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest
import requests

from api.openai.service import _session
from controller.core.types import InstanceSpec
from workers.actions.sleep_client import SleepClient
from workers.actions.weights_client import EngineAway, WeightsClient
from workers.backends.base import EngineError, Limits
from workers.backends.http import HttpBackend
from workers.backends.registry import ask
from workers.backends.vllm import VllmBackend
from workers.http import outbound
from workers.http.call_loop import LOOP
from workers.http.wire import Patience, Wire
from workers.provisioners.static import StaticProvisioner
from workers.ray.clusters import RayCluster
from workers.ray.jobs import ClusterUnreachable, Jobs

PATIENCE = Patience(2.0, 2.0, 2.0, 5.0)


class Server:
    """Answers all requests in the same way; keeps their paths, and counts connections, with or without a request."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.connections = 0
        self.status, self.headers, self.body = 200, {"Content-Length": "2"}, b"{}"
        self.endless = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(outer.status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(outer.body)
                    while outer.endless:
                        self.wfile.write(outer.endless)

            do_POST = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        class Counting(ThreadingHTTPServer):
            def get_request(self) -> tuple[socket.socket, object]:
                outer.connections += 1
                return super().get_request()

        self.server = Counting(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.server.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def only_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is not allowed: our server stands for what must not be reached."""
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")


def calls(url: str) -> list[object]:
    """What every client of an engine makes of it: an error, never an answer."""
    errors: list[object] = []
    with pytest.raises(EngineAway) as away:
        SleepClient(url).look()
    errors.append(away.value)
    with pytest.raises(EngineAway) as away:
        WeightsClient(url, "t").look()
    errors.append(away.value)
    [seen] = StaticProvisioner({"a": url}).observe()
    assert seen.state == "exited"
    errors.append(seen.error)
    errors += asyncio.run(_backend(url))
    return errors


async def _backend(url: str) -> list[object]:
    spec = InstanceSpec("a", "demo", url=url)
    async with aiohttp.ClientSession(connector=outbound.connector()) as session:
        backend: HttpBackend = VllmBackend(spec, session, Limits())
        with pytest.raises(EngineError) as telemetry:
            await backend.telemetry(0.0)
        with pytest.raises(EngineError) as control:
            await backend._control("/x", {})
        return [telemetry.value, control.value]


@pytest.mark.parametrize("named", ["{}", "east=http://10.0.0.1:8265, west={}/"])
def test_a_ray_dashboard_is_called_as_a_cluster_and_never_as_an_engine(server, monkeypatch, named):
    """Whoever reaches its API runs programs on all nodes."""
    monkeypatch.setenv("RAY_ADDRESS", named.format(server.url))
    calls(server.url)
    assert (server.paths, server.connections) == ([], 0)
    server.headers, server.body = {"Content-Type": "application/json", "Content-Length": "2"}, b"[]"
    assert LOOP.run(Jobs(RayCluster("west", server.url)).all()) == []
    assert server.paths == ["/api/jobs/"]
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")
    with pytest.raises(ClusterUnreachable, match="in no network"):
        LOOP.run(Jobs(RayCluster("west", server.url)).all())


@pytest.mark.usefixtures("only_ten")
def test_an_address_outside_is_never_called(server):
    errors = calls(server.url)
    assert (server.paths, server.connections) == ([], 0), "a connection alone tells which ports are open"
    assert not any("127.0.0.1" in str(error) and "refused" in str(error).lower() for error in errors)


@pytest.mark.usefixtures("only_ten")
def test_a_name_that_resolves_to_elsewhere_is_never_called(server):
    calls(f"http://localhost:{server.port}")
    assert (server.paths, server.connections) == ([], 0)


@pytest.mark.usefixtures("only_ten")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_session_of_a_gateway_calls_no_address_outside(server, host):
    """Telemetry and commands to all instances go through this one."""
    async with _session() as session:
        backend = VllmBackend(InstanceSpec("a", "demo", url=f"http://{host}:{server.port}"), session, Limits())
        with pytest.raises(EngineError):
            await backend.telemetry(0.0)
    assert (server.paths, server.connections) == ([], 0)


@pytest.mark.usefixtures("only_ten")
def test_a_session_that_is_made_for_one_call_calls_no_address_outside(server):
    with pytest.raises(EngineError):
        ask(InstanceSpec("a", "demo", url=server.url, backend="vllm"), lambda backend: backend.telemetry(0.0))
    assert (server.paths, server.connections) == ([], 0)


@pytest.mark.usefixtures("only_ten")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_data_path_calls_no_address_outside(server, host):
    with pytest.raises(ConnectionRefusedError):
        await Wire(f"http://{host}:{server.port}").post("/v1/completions", b"{}", PATIENCE)
    assert server.paths == []


def test_a_name_that_changes_between_check_and_connect_is_not_called(server, monkeypatch):
    """DNS rebinding: allowed when it is asked about, elsewhere when it is connected to."""
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")
    answers = iter([[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", server.port))]])
    real = socket.getaddrinfo

    def resolve(*arguments, **named):
        return next(answers, None) or real("127.0.0.1", server.port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(requests.ConnectionError):
        outbound.get(f"http://rebound.example:{server.port}/", timeout=2)
    assert server.paths == []


@pytest.mark.parametrize("variable", ["DATABASE_URL", "REDIS_URL", "GATEWAY_URL", "CONSOLE_URL"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_our_own_stores_and_servers_are_never_called(server, monkeypatch, variable, host):
    """A name may lead to them as well as an address, and even a listed one."""
    monkeypatch.setenv("ENGINE_NETWORKS", "127.0.0.0/8, localhost")
    monkeypatch.setenv(variable, f"http://127.0.0.1:{server.port}/0")
    calls(f"http://{host}:{server.port}")
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(Wire(f"http://{host}:{server.port}").post("/v1/completions", b"{}", PATIENCE))
    assert server.paths == []


def test_a_listed_host_may_have_any_address(server, monkeypatch):
    monkeypatch.setenv("ENGINE_NETWORKS", "localhost")
    assert outbound.get(f"http://localhost:{server.port}/", timeout=2).json() == {}
    with pytest.raises(requests.ConnectionError):
        outbound.get(server.url, timeout=2)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, status):
    server.status, server.headers = status, {"Location": f"{server.url}/secret", "Content-Length": "2"}
    calls(server.url)
    assert "/secret" not in server.paths


def test_no_proxy_and_no_netrc_of_the_environment(server, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    answer = outbound.get(server.url, timeout=2)
    assert answer.ok
    assert "Authorization" not in answer.request.headers


def test_answers_are_bounded(server, monkeypatch):
    monkeypatch.setattr(outbound, "MOST_BYTES", 1 << 20)
    server.headers, server.body, server.endless = {}, b"", b"x" * 65536
    with pytest.raises(outbound.UnboundedAnswer, match="more than"):
        outbound.get(server.url, timeout=5)
    assert len(asyncio.run(_backend(server.url))) == 2


async def test_an_answer_that_the_gateway_reads_is_bounded(server):
    """Long before a time-out ends it."""
    server.headers, server.body, server.endless = {}, b"", b"x" * 65536
    async with aiohttp.ClientSession(connector=outbound.connector()) as session, session.get(server.url) as response:
        with pytest.raises(aiohttp.ClientPayloadError, match="more than 1048576 bytes"):
            await outbound.read_answer(response, 1 << 20)


def test_an_answer_that_drips_ends(server, monkeypatch):
    monkeypatch.setattr(outbound, "MOST_S", 0.2)
    server.headers, server.body, server.endless = {}, b"", b"x"
    with pytest.raises(outbound.UnboundedAnswer, match="does not end"):  # and not because it became too large
        outbound.get(server.url, timeout=0.2)


def test_compressed_answers_are_not_unpacked(server):
    packed = gzip.compress(b"x" * (64 << 20))
    server.headers = {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    server.body = packed
    assert len(outbound.get(server.url, timeout=5).content) == len(packed)


async def test_a_whole_answer_is_bounded(server, monkeypatch):
    monkeypatch.setattr("workers.http.wire.MOST_BODY_BYTES", 1 << 20)
    server.headers, server.body, server.endless = {}, b"", b"x" * 65536
    connection = await Wire(server.url).post("/v1/completions", b"{}", PATIENCE)
    with pytest.raises(OSError, match="more than"):
        await connection.read()
    connection.close()
