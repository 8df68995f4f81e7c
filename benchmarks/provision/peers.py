"""Emulated peers of the provisioners, each kind in a process of its own (`-m benchmarks.provision.peers KIND PORT`).

`endpoints`: servers that are healthy, one for each path. `cluster`: a dashboard's Jobs REST that runs every job at once
and nothing in it. `launchers`: `POST /start` with an order opens the control port of that job, which answers as the
launcher of a ready engine does. No engine runs, so what is measured is the control plane's part alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from workers.ray.launcher import ports_of

HOST = "127.0.0.1"
ORDER = re.compile(r"SLACKLINE_ORDER=(\S+) ")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def endpoints() -> web.Application:
    async def healthy(request: web.Request) -> web.Response:
        return web.json_response({})

    return application({("GET", "/{name}/health"): healthy})


class EmulatedCluster:
    """`launchers`: URL of the process that opens control ports."""

    def __init__(self, launchers: str) -> None:
        self.launchers = launchers
        self.jobs: dict[str, dict[str, Any]] = {}

    def application(self) -> web.Application:
        return application(
            {
                ("GET", "/api/jobs/"): self.listed,
                ("POST", "/api/jobs/"): self.submitted,
                ("GET", "/api/v0/nodes"): self.nodes,
                ("GET", "/api/cluster_status"): self.status,
            }
        )

    async def listed(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.jobs.values()))

    async def submitted(self, request: web.Request) -> web.Response:
        body = await request.json()
        found = ORDER.search(body["entrypoint"])
        assert found is not None
        order = json.loads(base64.b64decode(found[1]))
        async with aiohttp.ClientSession() as session, session.post(f"{self.launchers}/start", json=order) as answer:
            answer.raise_for_status()
        self.jobs[body["submission_id"]] = {
            "submission_id": body["submission_id"],
            "status": "RUNNING",
            "metadata": body["metadata"],
            "entrypoint": body["entrypoint"],
            "driver_agent_http_address": f"http://{HOST}:-1",
        }
        return web.json_response({"submission_id": body["submission_id"]})

    async def nodes(self, request: web.Request) -> web.Response:
        node = {"node_id": "n1", "node_ip": HOST, "state": "ALIVE", "resources_total": {"CPU": 4.0}, "labels": {}}
        return web.json_response({"data": {"result": {"result": [node]}}})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response({"data": {"clusterStatus": {}}})


def launchers() -> web.Application:
    runners: list[web.AppRunner] = []

    async def start(request: web.Request) -> web.Response:
        order = await request.json()
        for port in ports_of(order["id"]):
            runner = web.AppRunner(launcher(order, port), access_log=None)
            await runner.setup()
            try:
                await web.TCPSite(runner, HOST, port + 1).start()
            except OSError:
                await runner.cleanup()
                continue
            runners.append(runner)  # kept, as is its port
            return web.json_response({})
        return web.json_response({"error": "no port is free"}, status=503)

    return application({("POST", "/start"): start})


def launcher(order: Mapping[str, Any], port: int) -> web.Application:
    async def whose(request: web.Request) -> web.Response:
        return web.json_response({"token_sha256": order["token_sha256"]})

    async def status(request: web.Request) -> web.Response:
        return web.json_response(
            {
                **{"id": order["id"], "state": "ready", "port": port, "exit_code": None, "error": "", "orphan": False},
                **{"pid": 1, "started_at": 0.0, "steps": {"process": 1.0, "ready": 2.0}},
            }
        )

    return application({("GET", "/whose"): whose, ("POST", "/lease"): status, ("GET", "/status"): status})


def application(routes: Mapping[tuple[str, str], Handler]) -> web.Application:
    made = web.Application()
    for (method, path), handler in routes.items():
        made.router.add_route(method, path, handler)
    return made


async def serve(kind: str, port: int, told: list[str]) -> None:
    kinds = {"endpoints": endpoints, "launchers": launchers, "cluster": lambda: EmulatedCluster(*told).application()}
    runner = web.AppRunner(kinds[kind](), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, port, backlog=512).start()
    print(f"{kind} at {port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
