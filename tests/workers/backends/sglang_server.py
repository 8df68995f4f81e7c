"""A contract fake of an SGLang 0.5.23 server: real sockets, the answers and refusals that its sources say it gives.

Emulated: what a model computes (text follows from the prompt) and how KV travels (the decode server fetches it from the
prefill server's bootstrap port). Not emulated: time. It refuses what SGLang refuses, and dies where SGLang would.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.workers.backends.sglang_seed import SglangSeed
from tests.workers.backends.sockets import Route

TAGS = ("kv_cache", "weights", "cuda_graph")
RANDOM = itertools.count(1)
TRANSFERS_THAT_SWITCH = ("mooncake", "mori")


class SglangServer(SglangSeed):
    """All of it, with what an operator asks. Switches of a test: `switch_fails`, `switch_refused`, `prepare_fails`,
    `dies_at`, `unhealthy`, `loads_missing`, `stuck` (its scheduler is inside a long step)."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.graphs: dict[str, Any] = {}
        if self.mode != "prefill":
            self.graphs = {"decode_cuda_graph_bs": [1, 2, 4], "decode_cuda_graph_memory_gb": 1.5}
        self.asked: list[str] = []  # paths of management calls, in order
        self.disk = self.args["model_path"]  # where weights lie
        self.released: set[str] = set()  # tags, as its scheduler keeps them
        self.stuck = False
        self.unhealthy = False
        self.switch_fails = ""  # message: the next real switch fails half-way
        self.switch_refused = ""  # message: it is refused before anything was changed
        self.prepare_fails = ""  # message: the dry run fails, and leaves it broken
        self.dies_at = ""  # "prepare", "switch": the process ends there, without an answer
        self.url = ""
        self.loads_missing = False
        self._takes = asyncio.Lock()  # the scheduler takes what the HTTP server sends it one after the other
        self._booted()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> SglangServer:
        if self.mode == "prefill" or self.args["enable_pd_role_switch"]:
            port = await self.listen([("GET", "/route", self._route), ("GET", "/kv/{room}", self._give_kv)])
            self.args["disaggregation_bootstrap_port"] = port
        routes: list[Route] = [
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._completions),
            ("GET", "/ready", self._ready),
            ("GET", "/health", self._health),
            ("GET", "/server_info", self._server_info),
            ("GET", "/v1/loads", self._loads),
            ("POST", "/abort_request", self._abort),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/release_memory_occupation", self._release),
            ("POST", "/resume_memory_occupation", self._resume),
            ("POST", "/update_weights_from_disk", self._update),
        ]
        routes += [
            ("GET", "/model_info", self._model_info),
            ("GET", "/remote_instance_transfer_engine_info", self._memory),
            ("POST", "/init_weights_send_group_for_remote_instance", self._send_group),
            ("POST", "/send_weights_to_remote_instance", self._send_weights),
        ]
        if self.args["enable_metrics"]:
            routes.append(("GET", "/metrics", self._metrics))
        if self.args["enable_pd_role_switch"]:
            routes.append(("POST", "/pd_role_switch", self._switch))
        self.url = f"http://127.0.0.1:{await self.listen(routes)}"
        return self

    def _booted(self) -> None:
        self.args |= {"random_seed": next(RANDOM), "startup_time": {"load_weight": 1.25, "scheduler_e2e": 7.5}}

    def reboot(self) -> None:
        """Its owner started it again: another process, with all of its memory."""
        self.released, self.weights, self.paused, self.unhealthy = set(), "good", False, False
        self._booted()

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    # ---- what it says of itself ------------------------------------------------------------------------------------

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused or self.unhealthy else 200)

    async def _health(self, request: web.Request) -> web.Response:
        """It generates a token, so it cannot succeed while paused, and remembers that it did not."""
        self.asked.append("/health")
        self.unhealthy = self.paused or self.unhealthy == "terminal"
        return web.Response(status=503 if self.unhealthy else 200)

    async def _server_info(self, request: web.Request) -> web.Response:
        await self._scheduled()
        return web.json_response({**self.args, "internal_states": [{"disaggregation_mode": self.mode, **self.graphs}]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.args["model_path"]})

    def _stages(self, name: str) -> int:
        return sum(job.stage == name for job in self.jobs.values())

    async def _loads(self, request: web.Request) -> web.Response:
        if self.loads_missing:
            return web.Response(status=404)
        names = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer", "decode_retracted")
        queues = {f"{name}_queue_reqs": self._stages(f"{name}_queue_reqs") for name in names}
        rank = {
            "dp_rank": 0,
            "num_running_reqs": self._stages("running"),
            "num_waiting_reqs": 0,
            "token_usage": 0.25,
            "max_total_num_tokens": 4096,
            "max_running_requests": self.args["max_running_requests"],
            "disaggregation": {"mode": self.mode, **queues},
        }
        return web.json_response({"loads": [rank]})

    async def _metrics(self, request: web.Request) -> web.Response:
        page = (
            'sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0\n'
            'sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 30.0\n'
            'sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 12.0\n'
            'sglang:generation_tokens_total{is_streaming="true",model_name="m"} 7.0\n'
        )
        return web.Response(text=page)

    # ---- management ------------------------------------------------------------------------------------------------

    async def _scheduled(self) -> None:
        async with self._takes:
            while self.stuck:
                await asyncio.sleep(0.005)

    async def _dies(self) -> web.Response:
        asyncio.get_running_loop().create_task(self.die())
        await asyncio.sleep(5)
        raise AssertionError("nobody hears of it")

    async def _pause(self, request: web.Request) -> web.Response:
        """By `abort` it is answered once no request is left."""
        self.asked.append("/pause_generation")
        self.paused = True
        while (await request.json()).get("mode") == "abort" and self.jobs:
            for job in self.jobs.values():
                job.gone.set()
            await asyncio.sleep(0.005)
        return web.Response()

    async def _continue(self, request: web.Request) -> web.Response:
        self.asked.append("/continue_generation")
        self.paused = False
        return web.Response()

    async def _release(self, request: web.Request) -> web.Response:
        """The scheduler asserts that it is idle, and the memory saver that the memory is there. Whoever asked may have
        gone meanwhile. Without a memory saver it says yes and keeps its memory."""
        self.asked.append("/release_memory_occupation")
        tags = set((await request.json()).get("tags") or TAGS)
        return await asyncio.shield(self._released(tags))

    async def _released(self, tags: set[str]) -> web.Response:
        await self._scheduled()
        saves = self.args["enable_memory_saver"]
        if self.jobs or (saves and tags & self.released):
            return await self._dies()
        self.released |= tags
        if "weights" in tags and saves and self.weights == "good":
            self.weights = "kept" if self.args["enable_weights_cpu_backup"] else "absent"
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        """A tag that is not released is a KeyError in its scheduler."""
        self.asked.append("/resume_memory_occupation")
        tags = set((await request.json()).get("tags") or TAGS)
        return await asyncio.shield(self._resumed(tags))

    async def _resumed(self, tags: set[str]) -> web.Response:
        await self._scheduled()
        if not tags <= self.released:
            return await self._dies()
        self.released -= tags
        if "weights" in tags:
            self.weights = {"kept": "good", "absent": "garbage"}.get(self.weights, self.weights)
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        self.asked.append("/update_weights_from_disk")
        body = await request.json()
        if body["model_path"] != self.disk:
            self.weights = "garbage"
            return web.json_response({"success": False, "message": f"no model at {body['model_path']}"}, status=400)
        self.weights = "good"
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _switch(self, request: web.Request) -> web.Response:
        self.asked.append("/pd_role_switch")
        body = await request.json()
        new, old = body["new_role"], self.mode

        def reply(success: bool, message: str, safe: bool = True) -> web.Response:
            said = {"success": success, "message": message, "old_role": old, "new_role": new, "safe_to_restore": safe}
            return web.json_response(said, status=200 if success else 400)

        if new == old:
            return reply(True, "already in target role")
        dry = bool(body.get("prepare_only"))
        if self.dies_at == ("prepare" if dry else "switch"):
            asyncio.get_running_loop().create_task(self.die())
            await asyncio.sleep(5)
        broken = self.prepare_fails if dry else self.switch_fails
        if broken:
            self.unhealthy = "terminal"  # type: ignore[assignment]
            return reply(False, broken, safe=False)
        hindrance = self._hindrance(body)
        if hindrance or dry:
            return reply(not hindrance, hindrance or "prepared")
        if self.switch_refused:
            return reply(False, self.switch_refused)
        if new == "decode" and not self.graphs:
            self.graphs = {name: body[name] for name in body if name.startswith("decode_cuda_graph")}
        self.mode = new
        return reply(True, f"switched from {old} to {new}")

    def _hindrance(self, body: dict[str, Any]) -> str:
        if self.args["disaggregation_transfer_backend"] not in TRANSFERS_THAT_SWITCH:
            return "transfer backend does not support role switch"
        if self.jobs:
            return "server is not fully idle"
        if body["new_role"] == "decode" and not self.graphs and body.get("decode_cuda_graph_memory_gb") is None:
            return "decode_cuda_graph_memory_gb is required: decode graphs were never captured"
        return ""


@contextmanager
def serving(*servers: SglangServer) -> Iterator[None]:
    """In a loop of their own, for code that is not async."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        yield
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.die(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
