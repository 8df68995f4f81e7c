"""Everything that reads bytes which a client, an engine, a peer or Redis may have written wrong. Each target takes any
bytes and raises nothing but what its callers expect. Hypothesis (`test_parsers`) and atheris (`coverage_guided`) both
feed them."""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from django.core.exceptions import ValidationError
from uvicorn.server import ServerState

from api.openai.protocol.errors import ApiError
from api.openai.protocol.response_requests import load_response_request, parse_response_request
from api.openai.protocol.schemas import parse_request
from api.openai.protocol.workflow_bodies import MOST_STAGES, parse_workflow
from api.openai.state.fleet import GatewayFleet
from api.openai.state.telemetry import Monitor
from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.events import Telemetry
from controller.core.pruning import OpenKv
from controller.core.snapshot import GatewaySnapshot, ModelConfig
from controller.core.steps import FinishReason, Seq, SeqState
from controller.core.types import InstanceSpec, Load, Role
from controller.dispatch.orders import OrderBook
from controller.flow.coordinator import Coordinator, CoordinatorConfig
from controller.services.experiments.traces import checked
from controller.simulator.workloads.sources import parse_row
from workers.actions.sleep_client import parse_state
from workers.actions.weights_client import EngineAway, _weights
from workers.backends import sglang_state
from workers.backends.base import MOST_TOLD_TOKENS, EngineError, Limits
from workers.backends.http import EventReader, kv_moved, parse_usage
from workers.backends.reference import ReferenceBackend
from workers.backends.vllm import parse_load, parse_prefilled
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvConnection, KvTraffic, Offer
from workers.engine.kv.wire import KvTransferError, be_greeted, greet
from workers.http import engine_keys
from workers.http.fleet_proof import Challenges
from workers.http.limits import HttpLimits
from workers.http.protocol import bounded
from workers.http.wire import Connection, Patience, Wire
from workers.live import orders_of
from workers.pruning import report_of
from workers.shared_clock import SharedClock

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}
SEEDS: dict[str, tuple[bytes, ...]] = {}
LOOP = asyncio.new_event_loop()
MODELS = {"tiny": ModelConfig("tiny", (), 4096, 4.0, "")}
EVENT = b'data: {"choices":[{"index":0,"text":" hi","finish_reason":null}]}\n\n'
logging.getLogger("uvicorn.error").disabled = True


class Found(AssertionError):
    """A parser that raised nothing, and yet did what it must not."""


def target(name: str, *seeds: bytes) -> Callable[[Target], Target]:
    def add(function: Target) -> Target:
        TARGETS[name], SEEDS[name] = function, seeds
        return function

    return add


def pieces(data: bytes) -> Iterator[bytes]:
    """The first byte says how the rest is cut, as a network cuts it."""
    size = (data[0] if data else 0) or 1 << 20
    for at in range(1, len(data), size):
        yield data[at : at + size]


def run(work: Coroutine[Any, Any, None]) -> None:
    LOOP.run_until_complete(asyncio.wait_for(work, 20.0))


class Pipe(asyncio.Transport):
    """A transport that keeps what is written, and whose other end is gone once it was closed."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 1)})
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


# ---- engines --------------------------------------------------------------------------------------------------------


@target(
    "events of a stream",
    b"\x09" + EVENT * 2 + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'\x05data: {"error": {"message": "no"}}\n\n',
    b": kv-began\n\n: kv {}\n\n" + EVENT.replace(b"\n", b"\r\n"),
)
def events(data: bytes) -> None:
    for chat in (False, True):
        reader, taken, given = EventReader(chat=chat, keep_usage=True), 0, 0
        with suppress(EngineError):
            for piece in pieces(data):
                taken += len(piece)
                chunk = reader.feed(piece)
                given += len(chunk.raw) if chunk is not None else 0
                if given > taken:
                    raise Found("more was passed on than came")
                if chunk is not None and chunk.done:
                    break


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@target(
    "answer of an engine",
    b"\x00" + WHOLE,
    b"\x07HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\x00HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
    b"\x00HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\x00" + WHOLE + WHOLE,
    b"\x00HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
)
def answer(data: bytes) -> None:
    run(_answer(data))


async def _answer(data: bytes) -> None:
    wire = Wire("http://127.0.0.1:8000")
    connection, pipe = Connection(wire), Pipe()
    connection.connection_made(pipe)
    asking = asyncio.ensure_future(connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"", Patience(5.0, 5.0, 5.0, 5.0)))
    await asyncio.sleep(0)
    for piece in pieces(data):
        if pipe.closed:
            break
        connection.data_received(piece)
    late = connection.at_eof() or connection._complete
    if not pipe.closed and not late:
        connection.connection_lost(None)
    with suppress(OSError):
        await asking
        await connection.read()
    connection.release()
    if wire._idle and connection._parts:
        raise Found("a connection is used again on which more came than its answer")
    connection.close()
    if wire._sweep is not None:
        wire._sweep.cancel()


@target(
    "figures of an engine",
    b'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n',
    b'vllm:engine_sleep_state{sleep_state="awake"} 1\nvllm:cache_config_info{num_gpu_blocks="9",block_size="16"} 1\n',
    b"vllm:num_requests_running inf\n",
    b"sglang:num_running_reqs 2\nsglang:token_usage 0.1\n",
)
def figures(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with suppress(ValueError, IndexError):  # what the poller takes as no page of figures
        parse_load(text, 0.0)
    with suppress(EngineAway):
        parse_state(text)
    with suppress(EngineError, ValueError, IndexError):
        sglang_state.load_of(sglang_state.parse_metrics(text), 0.0)


@target(
    "state of an SGLang",
    b'{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8998,"internal_states":[{}]}',
    b'{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":2,"token_usage":0.5}]}',
)
def sglang(data: bytes) -> None:
    for parse in (
        sglang_state.parse_info,
        lambda raw: sglang_state.parse_loads(raw, 0.0, Role.COLLOCATED),
        lambda raw: sglang_state.parse_loads(raw, 0.0, Role.DECODE),
        sglang_state.busy_with,
    ):
        with suppress(EngineError):
            parse(data)


class Told(ReferenceBackend):
    """A reference engine that answers every GET with the same bytes."""

    def __init__(self, said: bytes) -> None:
        super().__init__(InstanceSpec("e", "m", url="http://127.0.0.1:1"), None, Limits())  # type: ignore[arg-type]
        self._said = said

    async def _get(self, path: str, limit_s: float | None = None) -> bytes:
        return self._said

    async def _control(self, path: str, *told: Any) -> bytes:
        return self._said


@target(
    "what a reference engine says",
    b'{"peers":[{"peer":"p","host":"h","port":1,"state":"up","since_s":1.0}]}',
    b'{"role":"decode"}',
    b'{"challenge":"c"}',
    b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_host":"h"}}',
    b'{"bytes":1,"layers":2,"tokens":3,"cached":0,"seconds":0.1}',
    b'{"state":"present","bytes":5,"attempts":[{}],"present_s":1}',
    b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}',
    b'{"usage":{"prompt_tokens":1.7e308,"completion_tokens":-7}}',
)
def told(data: bytes) -> None:
    backend = Told(data)
    for ask in (backend.links, backend.role, lambda: backend.free_kv(["r"])):
        with suppress(EngineError):
            run(_asked(ask()))
    for parse in (parse_prefilled, kv_moved):
        with suppress(EngineError):
            parse(data)
    usage = parse_usage(data)
    assert usage is None or all(type(count) is int and 0 <= count <= MOST_TOLD_TOKENS for count in usage)
    with suppress(EngineAway, orjson.JSONDecodeError):
        said = orjson.loads(data)
        if isinstance(said, dict):
            _weights(said)


async def _asked(asking: Any) -> None:
    await asking


# ---- clients --------------------------------------------------------------------------------------------------------


@target(
    "body of a request",
    b'{"model":"tiny","prompt":"hello","max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}',
    b'{"model":"tiny","prompt":[1,2,3],"metadata":{"slo_class":"a","workflow":"w"},"temperature":0}',
    b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[]}',
    b'{"model":"tiny","input":[{"role":"user","content":"x"}],"instructions":"y","text":{"format":{"type":"text"}}}',
    b'{"model":"tiny","prompt":"x","vllm_xargs":{"kv_transfer_params":"x"},"n":1,"logit_bias":{"1":2}}',
)
def body(data: bytes) -> None:
    for parse in (
        lambda: parse_request(data, MODELS, chat=False),
        lambda: parse_request(data, MODELS, chat=True),
        lambda: parse_response_request(load_response_request(data), MODELS, retention_s=60),
    ):
        with suppress(ApiError):
            head = parse().head
            if any(name in orjson.loads(head + b"}") for name in ("kv_transfer_params", "rid", "bootstrap_host")):
                raise Found("a field of the engine's own was passed on")


@target(
    "body of a workflow",
    b'{"id":"w","deadline":5,"stages":[{"name":"plan"},{"name":"write","share":2.5}]}',
    b'{"deadline":1e308,"stages":[{"name":"","share":-0.0}]}',
    b'{"deadline":86400,"stages":[{"name":"a"},{"name":"a"}],"x":1}',
)
def workflow(data: bytes) -> None:
    with suppress(ApiError):
        found = parse_workflow(data)
        shares = [stage.share for stage in found.stages]
        if not (0 < found.deadline_s < float("inf") and found.id and len(shares) <= MOST_STAGES):
            raise Found(f"a workflow that cannot be: {found}")
        if not all(0 < share < float("inf") for share in shares):
            raise Found(f"stages that cannot be: {shares}")


class Served:
    """An application that reads whole requests and notes them."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        got, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            got, more = got + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(got)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LIMITS = HttpLimits(head_s=5.0, body_s=5.0, send_s=5.0, upload_s=5.0, connections=10, connections_per_address=10)


@target(
    "bytes of a client",
    b"\x00" + POST + b"Content-Length: 2\r\n\r\n{}",
    b"\x03" + POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\x00"
    + POST
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00" + POST + b"Transfer-Encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\x00" + POST + b"Transfer-Encoding : chunked\r\nContent-Length: 2\r\n\r\n{}",
    b"\x00" + POST + b"Content-Length: 2\r\nContent-Length: 20\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
    b"\x00" + POST + b"Content-Length: +2\r\n\r\n{}" + POST,
    b"\x00GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
def client(data: bytes) -> None:
    run(_client(data))


async def _client(data: bytes) -> None:
    served, pipe = Served(), Pipe()
    config = uvicorn.Config(served, http=bounded(LIMITS), ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=LOOP)
    failed: list[Any] = []
    LOOP.set_exception_handler(lambda loop, context: failed.append(context.get("exception") or context["message"]))
    protocol.connection_made(pipe)
    for piece in pieces(data):
        if pipe.closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(4):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.sleep(0)
    protocol.book.sweep.cancel() if getattr(protocol.book, "sweep", None) is not None else None
    if failed:
        raise Found(f"the server failed: {failed[0]!r}")
    if _framed_twice(data) and len(served.bodies) > 1:
        raise Found("a request with two lengths was served, and what followed it")


def _framed_twice(data: bytes) -> bool:
    """Whether the first head has both ways to say how long its body is."""
    head = data[1:].partition(b"\r\n\r\n")[0].lower()
    return b"\r\ncontent-length:" in head and b"\r\ntransfer-encoding:" in head


@target(
    "a trace",
    b"input_tokens,output_tokens,arrival_s\n10,20,0.5\n30,40,1.5\n",
    b"arrival_s,input_tokens,output_tokens,prefix_hashes,session\n0,1,1,a b,s\n",
    b"input_tokens,output_tokens\ninf,1e400\n",
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
)
def trace(data: bytes) -> None:
    with suppress(ValidationError):
        checked(data)
    text = data.decode("utf-8", "replace")
    names, _, rest = text.partition("\n")
    with suppress(ConfigError):
        parse_row(dict(zip(names.split(","), rest.partition("\n")[0].split(","), strict=False)), 1)


# ---- engines among one another --------------------------------------------------------------------------------------


def framed(**content: Any) -> bytes:
    raw = orjson.dumps(content)
    return struct.pack(">I", len(raw)) + raw


NONCE = "0" * 32
STORE = EmulatedKv(2, 64)
KV_EXPECTED = (KvTransferError, OSError, asyncio.IncompleteReadError)


def streams(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, pipe = asyncio.StreamReader(loop=LOOP), Pipe()
    protocol = asyncio.StreamReaderProtocol(reader, loop=LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    return reader, asyncio.StreamWriter(pipe, protocol, reader, LOOP)


@target(
    "greeting of a peer",
    framed(nonce=NONCE, to="a:1") + framed(proof="0" * 64),
    framed(nonce=NONCE, proof="0" * 64) + framed(ok=True),
    framed(error="no"),
    b"\x00\x00\xff\xff",
)
def greeting(data: bytes) -> None:
    run(_greeting(data))


async def _greeting(data: bytes) -> None:
    for greeted in (
        lambda reader, writer: greet(reader, writer, "t", "a:1"),
        lambda reader, writer: be_greeted(reader, writer, "t", {"a:1"}),
    ):
        try:
            await greeted(*streams(data))
        except KV_EXPECTED:
            continue
        raise Found("somebody got through who does not know the token")


def kept() -> Seq:
    made = Seq("s", 0.0, 8, 1, token_ids=[*range(8), 3], keep_kv=True, computed=8, output_tokens=1)
    made.state, made.finish = SeqState.FINISHED, FinishReason.LENGTH
    return made


HEADER = {**STORE.layout._asdict(), "tokens": 8}


@target(
    "KV that comes",
    framed(**HEADER) + framed(layer=0, start=0, stop=8) + bytes(8 * 64 + 4),
    framed(**HEADER) + framed(computing=True) + framed(first_token=3, early_bytes=0),
    framed(error="gone", lost=True),
)
def kv(data: bytes) -> None:
    async def pull() -> None:
        reader, writer = streams(data)
        seq = Seq("t", 0.0, 8, 8, token_ids=[*range(8), 0], output_tokens=1)
        with suppress(*KV_EXPECTED):
            await KvConnection(reader, writer).pull(Offer("h", 1, "s", 8), seq, STORE, KvTraffic())

    run(pull())


@target(
    "questions to a source",
    framed(op="ping") + framed(op="take", request="s", start=0, layout=["model"]) + b"\x01",
    framed(op="probe", bytes=10) + framed(op="take", request="x", start=0),
    framed(op="take", request="s", start=True, layout={"model": 1}),
)
def source(data: bytes) -> None:
    async def serve() -> None:
        server = KvServer(STORE, "t", {"s": kept()}.get, lambda seq: None)
        reader, writer = streams(data)
        with suppress(*KV_EXPECTED):
            for _ in range(20):
                await server._answer(await _frame(reader), reader, writer)

    run(serve())


async def _frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    from workers.engine.kv.wire import read_frame

    return await read_frame(reader)


# ---- Redis, files, headers ------------------------------------------------------------------------------------------


@target(
    "telemetry in Redis",
    b'{"observed_at":1.0,"running":1,"waiting":0,"kv_usage":0.5,"links":[{"peer":"p","host":"h","port":1,"state":"up"}]}',
    b'{"observed_at":null}',
    b'{"observed_at":1e999,"running":"x"}',
    b'{"observed_at":1.0,"running":"x"}',
    b'{"observed_at":1.0,"waiting":null,"kv_usage":-1.0,"max_num_seqs":null}',
)
def telemetry(data: bytes) -> None:
    """A gateway that does not poll reads what the leader has published."""
    run(_telemetry(data))


class ToldByRedis:
    """Redis that another gateway leads, with these bytes as the message about each instance."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def lease(self, what: str, ttl_s: float) -> bool:
        return False

    async def publish_telemetry(self, loads: dict[str, dict[str, Any]], ttl_s: float) -> None: ...

    async def read_telemetry(self, instance_ids: list[str]) -> dict[str, dict[str, Any]]:
        return {name: orjson.loads(self._said) for name in instance_ids}


class Listening:
    """The runtime: what it hears is what the scheduler decides by."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def push(self, event: Any) -> None:
        self.events.append(event)

    def instance_down(self, instance_id: str, why: str, *, died: bool = False) -> None: ...

    def serving(self, instance_id: str) -> int:
        return 0


async def _telemetry(data: bytes) -> None:
    def clock() -> float:
        return 10.0

    heard = Listening()
    fleet = GatewayFleet(None, Limits(), clock)  # type: ignore[arg-type]
    fleet.bind(heard)  # type: ignore[arg-type]
    fleet.apply(GatewaySnapshot(version=1, instances=(InstanceSpec("e1", "tiny", backend="fake"),)))
    shared = SharedClock(clock)
    shared.heard(1.5, 10.0, 10.0)
    monitor = Monitor(fleet, ToldByRedis(data), clock, shared)
    await monitor._read_leader()
    for event in heard.events:
        if isinstance(event, Telemetry):
            _is_load(event.load)


def _is_load(load: Load) -> None:
    for name, value in load._asdict().items():
        if name == "awake" or (value is None and Load._field_defaults.get(name, 0) is None):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Found(f"the scheduler was told {name}={value!r}")


CHALLENGES = Challenges()


@target(
    "pruning in Redis",
    b'["gw",1.0,[["demo",[["r",9.0,0.8,800,10.0,false,1.0]],[["e1",1.0,0.0,0.0,0]]]]]',
    b'["gw",1.0,[["demo",[["r",1e308,1e308,1,1e308,false,1e-308],["q",-1e308,0,0,0,true,1]],[["e1",1e-308,1e308,1e308,1]]]]]',
    b'["gw",1.0,[["demo",[["r",9.0,0.8,800,10.0,false,1.0]],[["p",1.0,0.0,0.0,0,[0.001,0.1,[["q",1.0,5,false,1.0,"d"],["s",1.0,9,true,1]]]]],{"d":1e-308,"e":0}]]]',
    b'{"sequence":9,"made_at":1.0,"expires_at":9.0,"scavengers":{"r":["e1",2.0,1.0]},"waiting":1,"batches":1,"gateways":["gw"]}',
)
def pruning(data: bytes) -> None:
    """The coordinator reads reports, and gateways read its orders."""
    report = report_of(data)
    if report is not None:
        sent = {name: OpenKv(f"h{number % 2}", 0.5, "to") for number, name in enumerate(report.ids())}
        Coordinator(CoordinatorConfig(drop_budget=0.5)).decide([report, report._replace(gateway="gw-b")], 0.5, sent)
    orders = orders_of(data)
    if orders is not None:
        found = {name: (reason.instance, reason.behind_s) for name, reason in orders.scavengers.items()}
        OrderBook().take(ev.Orders(orders.sequence, orders.expires_at, found), [], 0.0)


@target("a challenge", CHALLENGES.issue().encode(), b"1.0-aa-" + b"0" * 64, b"nan-a-b", b"-")
def challenge(data: bytes) -> None:
    if CHALLENGES.valid(data.decode("latin-1")) and data not in SEEDS["a challenge"]:
        raise Found("a challenge that was never given")


KEY_FILE = Path(f"/tmp/slackline-fuzz-key-{id(LOOP)}")


@target("file of a key", b"http://h:1 sk-1\n", b"https://[::1]:99999 k", b"http://[ k")
def key_file(data: bytes) -> None:
    KEY_FILE.write_bytes(data)
    try:
        engine_keys._read(KEY_FILE, "k")
    finally:
        KEY_FILE.unlink()
