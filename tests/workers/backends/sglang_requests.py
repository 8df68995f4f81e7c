"""What the SGLang fake does with requests: its queues, prefill and decode servers that meet in a room, aborts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from tests.workers.backends.sockets import Sockets, send_event

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


class SglangRequests(Sockets):
    """The half of a server that clients and other servers talk to. `args` as `/server_info` tells them.

    Switches of a test: `pace_s`, `refuse`, `hold` (nothing computes while cleared), `bootstrap_timeout_s`.
    """

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.args = {**DEFAULTS, **args}
        self.mode = self.args["disaggregation_mode"]
        self.jobs: dict[str, Job] = {}
        self.rooms: dict[int, Room] = {}
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.weights = "good"  # good | garbage | absent
        self.paused = False
        self.pace_s = 0.0
        self.refuse = 0
        self.tokens = 4
        self.hold = asyncio.Event()
        self.hold.set()
        self.bootstrap_timeout_s = 300.0

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
            return refused(self.refuse, "scripted")
        if body.get("rid") in self.jobs:
            return refused(400, f"Duplicate request ID detected: {body['rid']}")
        if self.mode != "null" and body.get("bootstrap_room") is None:
            return refused(400, "disaggregation mode requires bootstrap_room")
        if body.get("priority") is None or self.args["enable_priority_scheduling"]:
            return None
        refuses = self.args["abort_on_priority_when_disabled"]
        return refused(503, "priority is set but priority scheduling is disabled") if refuses else None

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
            return refused(500, failure)
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


def refused(status: int, message: str) -> web.Response:
    said = {"object": "error", "message": message, "type": "Error", "param": None, "code": status}
    return web.json_response(said, status=status)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "total_tokens": 3 + tokens, "completion_tokens": tokens}
