"""A contract fake of a vLLM server with the NIXL pull connector: its dialect of disaggregation on real sockets.

Emulated: what a model computes, and how blocks travel (the decode server fetches them from the prefill server's side
channel, a port of its own). Kept: which parameters a prefill must carry, what it answers, leases, refusals.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from tests.workers.backends.sockets import Route, Sockets, send_event

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PATIENCE = aiohttp.ClientTimeout(total=5)
NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


class NixlServer(Sockets):
    """`policy`: kv_load_failure_policy, `fail` or `recompute`."""

    def __init__(self, *, lease_s: float = 30.0, policy: str = "fail") -> None:
        super().__init__()
        self.lease_s = lease_s
        self.policy = policy
        self.engine_id = str(uuid.uuid4())
        self.kept: dict[str, tuple[float, str]] = {}  # blocks for decode servers: until when, what they hold
        self.freed = 0  # because a decode server had refused their request
        self.bodies: list[dict[str, Any]] = []
        self.refuse = 0
        self.computed = 0  # prompts prefilled here
        self.pulled = 0
        self.finish_prefill = "length"
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = 0
        self.url = ""
        self.side_port = 0

    async def __aenter__(self) -> NixlServer:
        blocks = "/blocks/{engine}/{request}"
        self.side_port = await self.listen([("GET", blocks, self._give), ("DELETE", blocks, self._free)])
        routes: list[Route] = [("GET", "/metrics", self._metrics), ("GET", "/health", self._metrics)]
        routes += [("POST", f"/v1/{path}", self._generate) for path in ("completions", "chat/completions")]
        self.url = f"http://127.0.0.1:{await self.listen(routes)}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {float(self.running)}\n')

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuse:
            await self._notify(body.get("kv_transfer_params") or {})
            return _error(self.refuse, "scripted")
        if body.get("stream_options") and not body.get("stream"):
            return _error(400, "Stream options can only be defined when stream=True.")
        self.running += 1
        try:
            await self.hold.wait()
            return await self._serve(request, body)
        finally:
            self.running -= 1

    async def _serve(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params") or {}
        text = ""
        if params.get("do_remote_prefill"):
            text = await self._pull(params)
            if not text and self.policy == "fail":
                return _error(500, "failed to load KV")
            self.pulled += bool(text)
        if not text:
            self.computed += 1
            text = f"by {self.engine_id[:4]}"
        return await self._answer(request, body, text, bool(params.get("do_remote_decode")))

    async def _pull(self, params: dict[str, Any]) -> str:
        if any(params.get(name) is None for name in NEEDED):
            return ""
        try:
            async with self.session.get(_at(params), timeout=PATIENCE) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""

    async def _notify(self, params: dict[str, Any]) -> None:
        """A request that the API refuses is told to the connector, so that the prefill server frees its blocks."""
        if params.get("do_remote_prefill") and all(params.get(name) is not None for name in NEEDED):
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self.session.delete(_at(params), timeout=PATIENCE):
                    pass

    async def _free(self, request: web.Request) -> web.Response:
        self.freed += self.kept.pop(request.match_info["request"], None) is not None
        return web.Response()

    async def _give(self, request: web.Request) -> web.Response:
        """Pulled blocks are freed at once; those nobody pulled when their lease has ended."""
        until, text = self.kept.pop(request.match_info["request"], (0.0, ""))
        right = request.match_info["engine"] == self.engine_id and time.monotonic() < until
        return web.Response(text=text) if right else web.Response(status=404)

    def _offer(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        name = f"cmpl-{body['request_id']}-0"
        self.kept[name] = (time.monotonic() + self.lease_s, text)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[3, 1, 2]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.side_port,
            "tp_size": 1,
            "remote_num_tokens": 3,
            "transfer_mode": "pull",
        }

    async def _answer(self, request: web.Request, body: dict[str, Any], text: str, remote: bool) -> web.StreamResponse:
        chat, tokens = request.path.endswith("/chat/completions"), int(body.get("max_tokens", 4))
        usage = {"prompt_tokens": 3, "total_tokens": 3 + tokens, "completion_tokens": tokens}
        if not body.get("stream"):
            said = " ".join([text] * tokens)
            piece = {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
            finish = self.finish_prefill if remote else "length"
            offer = None
            if (
                remote
                and finish in ("length", "stop")
                and {name: body["kv_transfer_params"].get(name, "missing") for name in ASKED} == ASKED
            ):
                offer = self._offer(body, text)
            choices = [{"index": 0, **piece, "finish_reason": finish}]
            return web.json_response({"choices": choices, "usage": usage, "kv_transfer_params": offer})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(tokens):
            piece = {"delta": {"content": f"{text} "}} if chat else {"text": f"{text} "}
            finish = "length" if index == tokens - 1 else None
            await send_event(response, {"choices": [{"index": 0, **piece, "finish_reason": finish}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send_event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _at(params: dict[str, Any]) -> str:
    """Where blocks wait: on their server's side channel."""
    path = f"/blocks/{params['remote_engine_id']}/{params['remote_request_id']}"
    return f"http://{params['remote_host']}:{params['remote_port']}{path}"


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "Error", "param": None, "code": status}}, status=status
    )
