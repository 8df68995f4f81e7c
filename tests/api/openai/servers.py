"""A gateway in the test's own loop whose instances are real servers on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import aiohttp

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.types import InstanceSpec
from tests.api.openai.gateways import TestBed, snapshot
from tests.waiting import until_on_loop
from workers.backends.base import Limits

PATIENT = Limits(connect_s=30.0, telemetry_s=30.0)  # however slow the test's machine


class ServerBed(TestBed):
    """`specs` with the urls of servers that listen."""

    __test__ = False

    def __init__(self, specs: Sequence[InstanceSpec], session: aiohttp.ClientSession) -> None:
        super().__init__(replace(snapshot(()), instances=tuple(specs)))
        self.gateway = Gateway(GatewayOptions("test", limits=PATIENT), session, self.sink)

    async def __aenter__(self) -> ServerBed:
        await super().__aenter__()
        await until_on_loop(lambda: all(seat.up for seat in self.gateway.fleet.seats.values()), 30)
        await asyncio.sleep(0)
        return self

    def decisions(self) -> list[tuple[str, str]]:
        (record,) = self.sink.records
        return [(step["kind"], step["reason"]) for step in record.decisions]

    def outstanding(self) -> int:
        """What the dispatcher believes to be at its instances."""
        return sum(each.outstanding for each in self.gateway.scheduler.dispatcher._fleet.instances.values())
