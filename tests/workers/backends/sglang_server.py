"""A contract fake of an SGLang 0.5.23 server: real sockets, the answers and refusals that its sources say it gives.

Emulated: what a model computes (text follows from the prompt) and how KV travels (the decode server fetches it from the
prefill server's bootstrap port). Not emulated: time. It refuses what SGLang refuses, and dies where SGLang would.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

from tests.workers.backends.sockets import Route, Sockets, send_event

TRANSFERS_THAT_SWITCH = ("mooncake", "mori")
DEFAULTS: dict[str, Any] = {
    "model_path": "/models/demo",
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "max_running_requests": 8,
    "disaggregation_mode": "null",
    "disaggregation_transfer_backend": "mooncake",
    "enable_pd_role_switch": False,
    "enable_metrics": False,
    "enable_memory_saver": False,
    "enable_weights_cpu_backup": False,
    "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False,
    "abort_on_priority_when_disabled": False,
    "remote_instance_weight_loader_start_seed_via_transfer_engine": False,
    "version": "0.5.23",
}


class Job:
    """One request in the scheduler."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.rid = str(body.get("rid") or id(self))
        self.stage = "running"  # or the disaggregation queue it is in
        self.gone = asyncio.Event()


class Room:
    def __init__(self) -> None:
        self.taken = asyncio.Event()  # a decode server has come
        self.kv: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.landed = asyncio.Event()


class SglangServer(Sockets):
    """`args` as `/server_info` tells them. Switches of a test: `pace_s`, `hold` (nothing computes while cleared)."""

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.args = {**DEFAULTS, **args}
        self.mode = self.args["disaggregation_mode"]
        self.graphs: dict[str, Any] = {}
        if self.mode != "prefill":
            self.graphs = {"decode_cuda_graph_bs": [1, 2, 4], "decode_cuda_graph_memory_gb": 1.5}
        self.jobs: dict[str, Job] = {}
        self.rooms: dict[int, Room] = {}
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []  # paths of management calls, in order
        self.aborted: list[str] = []
        self.disk = self.args["model_path"]  # where weights lie
        self.weights = "good"  # good | garbage | absent
        self.released: set[str] = set()
        self.paused = False
        self.unhealthy = False
        self.switch_fails = ""  # message: the next real switch fails half-way
        self.pace_s = 0.0
        self.refuse = 0
        self.tokens = 4
        self.hold = asyncio.Event()
        self.hold.set()
        self.bootstrap_timeout_s = 300.0
        self.url = ""
        self.loads_missing = False

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
        ]
        if self.args["enable_metrics"]:
            routes.append(("GET", "/metrics", self._metrics))
        if self.args["enable_pd_role_switch"]:
            routes.append(("POST", "/pd_role_switch", self._switch))
        self.url = f"http://127.0.0.1:{await self.listen(routes)}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        job = Job(body)
        self.jobs[job.rid] = job
        try:
            return await self._serve(request, job)
        finally:
            self.jobs.pop(job.rid, None)

    def _refusal(self, body: dict[str, Any]) -> web.Response | None:
        if self.refuse:
            return _error(self.refuse, "scripted")
        if body.get("rid") in self.jobs:
            return _error(400, f"Duplicate request ID detected: {body['rid']}")
        if self.mode != "null" and body.get("bootstrap_room") is None:
            return _error(400, "disaggregation mode requires bootstrap_room")
        if body.get("priority") is None or self.args["enable_priority_scheduling"]:
            return None
        refuses = self.args["abort_on_priority_when_disabled"]
        return _error(503, "priority is set but priority scheduling is disabled") if refuses else None

    async def _serve(self, request: web.Request, job: Job) -> web.StreamResponse:
        while self.paused and not job.gone.is_set():  # held, not refused
            await asyncio.sleep(0.005)
        text = "garbage" if self.weights != "good" else f"of {len(job.body.get('prompt') or 'chat')}"
        if self.mode == "prefill":
            failure = await self._or_gone(job, self._prefill(job, text))
        elif self.mode == "decode":
            text, failure = await self._fetched(job)
        else:
            failure = await self._or_gone(job, self.hold.wait())
        if isinstance(failure, str):
            return _error(500, failure)
        tokens = 1 if self.mode == "prefill" else int(job.body.get("max_tokens", self.tokens))
        return await self._answer(request, job, text, tokens)

    async def _prefill(self, job: Job, text: str) -> str | None:
        """Bootstrap queue until a decode server comes, then the prompt, then until its KV was taken."""
        room = self.rooms.setdefault(job.body["bootstrap_room"], Room())
        try:
            job.stage = "prefill_bootstrap_queue_reqs"
            async with asyncio.timeout(self.bootstrap_timeout_s):
                await room.taken.wait()
            job.stage = "running"
            await self.hold.wait()
            room.kv.set_result({"text": text})
            job.stage = "prefill_inflight_queue_reqs"
            await room.landed.wait()
            return None
        except TimeoutError:
            return "KVBootstrapTimeout"
        except asyncio.CancelledError:
            if not room.kv.done():
                room.kv.set_exception(ConnectionError("prefill aborted"))
                room.kv.exception()
            raise
        finally:
            self.rooms.pop(job.body["bootstrap_room"], None)

    async def _fetched(self, job: Job) -> tuple[str, str | None]:
        job.stage = "decode_transfer_queue_reqs"
        body = job.body
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/kv/{body['bootstrap_room']}"
        found: dict[str, Any] = {}

        async def fetch() -> str | None:
            try:
                timeout = aiohttp.ClientTimeout(total=self.bootstrap_timeout_s)
                async with self.session.get(url, timeout=timeout) as response:
                    if response.status != 200:
                        return f"KVTransferError: {await response.text()}"
                    found.update(await response.json())
                    return None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return f"KVTransferError: {type(error).__name__}"

        failure = await self._or_gone(job, fetch())
        if failure is None and not job.gone.is_set():
            job.stage = "running"
            failure = await self._or_gone(job, self.hold.wait())
        return found.get("text", ""), failure if isinstance(failure, str) else None

    async def _or_gone(self, job: Job, work: Any) -> Any:
        """The work, or until the job was aborted."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(job.gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, gone):
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(task, gone, return_exceptions=True)

    async def _answer(self, request: web.Request, job: Job, text: str, tokens: int) -> web.StreamResponse:
        chat = request.path.endswith("/chat/completions")
        reason = "length"
        if not job.body.get("stream"):
            reason = "abort" if job.gone.is_set() else reason
            said = " ".join([text] * tokens)
            piece = {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
            return web.json_response(
                {"choices": [{"index": 0, **piece, "finish_reason": reason}], "usage": _usage(tokens)}
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(tokens):
            if self.pace_s:
                await self._or_gone(job, asyncio.sleep(self.pace_s))
            if job.gone.is_set():
                break
            piece = {"delta": {"content": f"{text} "}} if chat else {"text": f"{text} "}
            last = "length" if index == tokens - 1 else None
            await send_event(response, {"choices": [{"index": 0, **piece, "finish_reason": last}]})
        if job.gone.is_set():
            piece = {"delta": {}} if chat else {"text": ""}
            await send_event(response, {"choices": [{"index": 0, **piece, "finish_reason": "abort"}]})
        if (job.body.get("stream_options") or {}).get("include_usage"):
            await send_event(response, {"choices": [], "usage": _usage(tokens)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, job in list(self.jobs.items()):
            if body.get("abort_all") or rid.startswith(body["rid"]):
                self.aborted.append(rid)
                job.gone.set()
        return web.Response()

    # ---- bootstrap server ------------------------------------------------------------------------------------------

    async def _route(self, request: web.Request) -> web.Response:
        return web.json_response({"tp_size": 1}, status=200 if self.mode == "prefill" else 503)

    async def _give_kv(self, request: web.Request) -> web.Response:
        room = self.rooms.setdefault(int(request.match_info["room"]), Room())
        room.taken.set()
        try:
            kv = await asyncio.shield(room.kv)
        except ConnectionError as error:
            return web.Response(status=500, text=str(error))
        room.landed.set()
        return web.json_response(kv)

    # ---- what it says of itself ------------------------------------------------------------------------------------

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused or self.unhealthy else 200)

    async def _health(self, request: web.Request) -> web.Response:
        """It generates a token, so it cannot succeed while paused, and remembers that it did not."""
        self.asked.append("/health")
        self.unhealthy = self.paused or self.unhealthy == "terminal"
        return web.Response(status=503 if self.unhealthy else 200)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({**self.args, "internal_states": [{"disaggregation_mode": self.mode, **self.graphs}]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.args["model_path"]})

    async def _memory(self, request: web.Request) -> web.Response:
        """Where a joiner reads weights: only of a server that was started as such a seed."""
        if not self.args["remote_instance_weight_loader_start_seed_via_transfer_engine"]:
            return _error(400, "this server is no seed")
        rank = int(request.query["rank"])
        where = ["127.0.0.1:15000", {"model.embed_tokens.weight": [4096, 10, 2]}]
        return web.json_response({"rank": rank, "remote_instance_transfer_engine_info": where})

    async def _send_group(self, request: web.Request) -> web.Response:
        body = await request.json()
        ports = body["ports"].split(",")
        right = self.args["dp_size"] == 1 and len(ports) == self.args["tp_size"] and body["world_size"] == 2
        return web.json_response({"success": right, "message": ""}, status=200 if right else 400)

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

    async def _pause(self, request: web.Request) -> web.Response:
        self.asked.append("/pause_generation")
        if (await request.json()).get("mode") == "abort":
            for job in self.jobs.values():
                job.gone.set()
        self.paused = True
        return web.Response()

    async def _continue(self, request: web.Request) -> web.Response:
        self.asked.append("/continue_generation")
        self.paused = False
        return web.Response()

    async def _release(self, request: web.Request) -> web.Response:
        """The scheduler asserts that it is idle."""
        self.asked.append("/release_memory_occupation")
        if self.jobs and not self.paused:
            asyncio.get_running_loop().create_task(self.die())
            await asyncio.sleep(5)
        if not self.args["enable_memory_saver"]:
            return _error(400, "memory saver is not enabled")
        self.released = set((await request.json()).get("tags") or ("kv_cache", "weights", "cuda_graph"))
        if "weights" in self.released and self.weights == "good":
            self.weights = "kept" if self.args["enable_weights_cpu_backup"] else "absent"
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        self.asked.append("/resume_memory_occupation")
        self.released = set()
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
        hindrance = self._hindrance(body)
        if hindrance or body.get("prepare_only"):
            return reply(not hindrance, hindrance or "prepared")
        if self.switch_fails:
            self.unhealthy = "terminal"  # type: ignore[assignment]
            return reply(False, self.switch_fails, safe=False)
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


def _error(status: int, message: str) -> web.Response:
    said = {"object": "error", "message": message, "type": "Error", "param": None, "code": status}
    return web.json_response(said, status=status)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "total_tokens": 3 + tokens, "completion_tokens": tokens}


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
