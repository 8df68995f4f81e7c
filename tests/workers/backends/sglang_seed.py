"""What the SGLang fake does as the seed of another server's weights (`--load-format remote_instance`).

Emulated: the bytes, and the collective of two ranks: what the joiner would receive into is told by `receives`. Kept:
the two calls of `nccl`, ports that a join uses up, a seed that generates nothing while it sends, and that a collective
whose sides differ does not end. By `transfer_engine` the seed is read, and serves on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from tests.workers.backends.sglang_requests import SglangRequests, refused

Layout = dict[str, list[int]]  # by parameter: where, elements, bytes an element

ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def layout_of(dtype: str | None, quantization: str | None, tp_size: int) -> Layout:
    """The parameters that a rank of a server started so has: equal only for the same number format and layout."""
    size = 1 if quantization else ELEMENT_BYTES[dtype or "auto"]
    return {f"model.{name}.weight": [4096, 64 // tp_size, size] for name in ("embed_tokens", "norm")}


class SglangSeed(SglangRequests):
    """`used_ports`: by earlier joins. `sending` is set while it sends; a test may hold that up with `broadcast`."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.used_ports: set[str] = set()
        self.sending = asyncio.Event()
        self.broadcast = asyncio.Event()
        self.broadcast.set()
        self._groups: dict[str, str] = {}  # name: its ports
        self._receives: dict[str, Layout] = {}

    @property
    def layout(self) -> Layout:
        return layout_of(self.args.get("dtype"), self.args.get("quantization"), self.args["tp_size"])

    def receives(self, group: str, layout: Layout) -> None:
        """The joiner has entered its side of the group."""
        self._receives[group] = layout

    async def _memory(self, request: web.Request) -> web.Response:
        """Where a joiner reads weights: only of a server that was started as such a seed."""
        if not self.args["remote_instance_weight_loader_start_seed_via_transfer_engine"]:
            return refused(400, "this server is no seed")
        rank = int(request.query["rank"])
        return web.json_response(
            {"rank": rank, "remote_instance_transfer_engine_info": ["127.0.0.1:15000", self.layout]}
        )

    async def _send_group(self, request: web.Request) -> web.Response:
        body = await request.json()
        ports = body["ports"].split(",")
        if self.args["dp_size"] != 1 or len(ports) != self.args["tp_size"] or body["world_size"] != 2:
            return _said(False, "one data-parallel rank, a port for each tensor-parallel one, two ranks a group")
        if self._groups:
            return _said(False, "weights are being sent to another instance")
        if not self.used_ports.isdisjoint(ports):
            return _said(False, "address already in use")
        self.used_ports.update(ports)
        self._groups[body["group_name"]] = body["ports"]
        self.hold.clear()  # the rendezvous is in its scheduler
        return _said(True, "")

    async def _send_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["group_name"]
        if self._groups.get(name) != body["ports"]:
            return _said(False, f"no group {name} with these ports")
        self.sending.set()
        await self.broadcast.wait()
        if self._receives.get(name) != self.layout:
            await asyncio.Event().wait()  # its caller goes away; what waits in the scheduler stays
        del self._groups[name]
        self.sending.clear()
        self.hold.set()
        return _said(True, "")


def _said(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)
