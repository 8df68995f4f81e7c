"""A client that stops reading its stream: its slot is freed, and its record says why."""

from __future__ import annotations

import contextlib
import json

import uvicorn

from benchmarks.attacks import hostile
from controller.core.types import Outcome
from tests.api.openai.gateways import KEY, TestBed, completion
from tests.waiting import until_on_loop
from workers.backends.fake import Script
from workers.http.limits import HttpLimits
from workers.http.protocol import bounded

BODY = json.dumps(completion(stream=True)).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
    % (KEY.encode(), len(BODY))
) + BODY


async def test_a_client_that_never_reads_frees_its_slot_and_is_recorded():
    async with TestBed() as bed:
        bed.every(Script(tokens=10_000_000))
        protocol = bounded(HttpLimits(send_s=0.5))
        config = uvicorn.Config(bed.app, port=0, http=protocol, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        serving = bed.gateway.runtime.spawn(server.serve())
        await until_on_loop(lambda: server.started)
        stalled = await hostile.connect(server.servers[0].sockets[0].getsockname()[1], receive_buffer=2_048)
        stalled.reader._transport.pause_reading()
        await stalled.send(REQUEST)
        await until_on_loop(lambda: bed.sink.records, 20)
        [record] = bed.sink.records
        assert (record.outcome, record.error_code) == (Outcome.CANCELLED, "client_stalled")
        assert not bed.gateway.runtime.requests
        assert sum(backend.running for backend in bed.gateway.fleet.backends.values()) == 0
        stalled.close()
        server.should_exit = True
        await serving
