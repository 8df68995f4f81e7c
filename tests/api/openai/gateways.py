"""A whole gateway in the test's own loop: fake backends, no socket, no service; and a client that speaks ASGI to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

from api.openai.app import OpenAIApp
from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ClassConfig, GatewaySnapshot, KeyConfig, ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, RequestRecord, WorkflowCancellation
from workers.backends.fake import FakeBackend, Script

KEY = "sk-test-key"


class ListSink:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.cancellations: list[WorkflowCancellation] = []

    def add(self, record: RequestRecord, reason: str = "") -> None:
        self.records.append(record)

    def cancelled(self, cancellation: WorkflowCancellation) -> None:
        self.cancellations.append(cancellation)


def key_config(secret: str = KEY, **changes: Any) -> KeyConfig:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return KeyConfig(**{"id": 1, "tenant": "acme", "sha256": digest, "prefix": secret[:6], **changes})


def snapshot(instances: Sequence[str] = ("e1", "e2"), **changes: Any) -> GatewaySnapshot:
    chat = ClassConfig("chat", None, 2.0, 0.1, None, 10.0, 0.95, 1.0)
    fields: dict[str, Any] = {
        "version": 1,
        "tenants": (TenantConfig(1, "acme", "chat"),),
        "keys": (key_config(),),
        "classes": (chat,),
        "models": (ModelConfig("demo", ("gpt",), context_tokens=1000),),
        "instances": tuple(InstanceSpec(name, "demo", backend="fake") for name in instances),
    }
    return GatewaySnapshot(**{**fields, **changes})


class Answer:
    """What a client received; `ended` when the response was complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]


class Client:
    """One request; `hang_up` closes the connection."""

    def __init__(
        self,
        app: OpenAIApp,
        path: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        method: str,
        query: str = "",
    ):
        self.answer = Answer()
        self._gone = asyncio.Event()
        self._parts = [body]
        scope: MutableMapping[str, Any] = {"type": "http", "path": path, "method": method, "headers": list(headers)}
        scope["query_string"] = query.encode()
        scope["client"] = ("127.0.0.1", 50_000)
        self.task = asyncio.get_running_loop().create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        waits = [asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(self.answer.ended.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer.body += message.get("body", b"")
            if not message.get("more_body"):
                self.answer.ended.set()
        self.answer.changed.set()

    async def hang_up(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, 5)

    async def done(self) -> Answer:
        await asyncio.wait_for(self.task, 20)
        return self.answer


class TestBed:
    """A configured gateway whose instances are up."""

    __test__ = False

    def __init__(self, config: GatewaySnapshot | None = None, policy: str = "slackline", name: str = "test") -> None:
        self.sink = ListSink()
        session: Any = None  # fake backends open no connection
        self.gateway = Gateway(GatewayOptions(name, policy), session, self.sink)
        self.config = config or snapshot()
        self.app = OpenAIApp(self._start, self._stop)

    async def _start(self) -> Gateway:
        return self.gateway

    async def _stop(self) -> None:
        self.gateway.closing = True

    async def __aenter__(self) -> TestBed:
        self.app._gateway = self.gateway
        self.gateway.configure(self.config)
        await self.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.gateway.runtime.drain(1)

    def backend(self, name: str, *scripts: Script) -> FakeBackend:
        backend = self.gateway.fleet.backends[name]
        assert isinstance(backend, FakeBackend)
        if scripts:
            backend.scripts = list(scripts)
        return backend

    def every(self, *scripts: Script) -> None:
        for name in self.gateway.fleet.backends:
            self.backend(name, *scripts)

    def send(
        self, body: Any, path: str = "/v1/completions", key: str = KEY, method: str = "POST", query: str = ""
    ) -> Client:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Client(self.app, path, raw, [(b"authorization", f"Bearer {key}".encode())], method, query)

    async def ask(
        self, body: Any, path: str = "/v1/completions", key: str = KEY, method: str = "POST", query: str = ""
    ) -> Answer:
        return await self.send(body, path, key, method, query).done()


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, **changes}


async def settled() -> None:
    """Let everything go on that waits for no timer and no socket: before saying that something did not happen."""
    for _ in range(50):
        await asyncio.sleep(0)
