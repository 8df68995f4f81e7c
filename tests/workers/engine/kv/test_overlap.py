"""KV that moves while its prompt is still being computed: two real processes, and the answer is the single engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import pytest

from controller.core.kv_links import KvMoved, moved_from_json
from controller.core.steps import Chunk as StepChunk
from controller.core.steps import FinishReason, Seq, SeqState, Step
from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, events_of, kv_has_come, kv_received, post, samples
from tests.workers.engine.held import PrefillGate
from tests.workers.engine.offers import fleet_offer, signed
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.suspended import turns
from tests.workers.engine.test_engine import make_engine
from workers.engine.errors import HttpError
from workers.engine.kv import links as kv_links
from workers.engine.kv import server as kv_server
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import Links
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import NOBODY, KvTraffic, Listener, Offer
from workers.engine.kv.wire import KvTransferError
from workers.engine.text.streams import Stream

PROMPT = list(range(10, 330))
LAYERS, TOKEN_BYTES = 4, 1024
WHOLE = LAYERS * TOKEN_BYTES * len(PROMPT)
OPTIONS = (
    *("--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64", "--no-enable-prefix-caching"),
    *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(TOKEN_BYTES), "--shutdown-timeout", "0"),
)
SCHEDULERS = {
    "continuous": ("--max-num-batched-tokens", "160"),  # the prompt takes two steps, and is offered with the second
    "slackline": (),  # one, and it is offered when three of four layers are passed
}
EARLY_BYTES = WHOLE * (LAYERS - 1) // LAYERS  # what moves while the last step is held in its last layer
EARLY = {"do_remote_decode": True, "early": True}


@pytest.fixture(scope="module")
def module_gate(tmp_path_factory: pytest.TempPathFactory) -> PrefillGate:
    return PrefillGate(tmp_path_factory.mktemp("prefill"))


@pytest.fixture
def gate(module_gate: PrefillGate) -> Iterator[PrefillGate]:
    """No prefill ends before the test opens it."""
    with module_gate.closed():
        yield module_gate


@pytest.fixture(scope="module", params=list(SCHEDULERS))
def scheduler(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(scheduler: str, module_gate: PrefillGate) -> Iterator[dict[str, EngineProcess]]:
    same, told = (*OPTIONS, "--scheduler", scheduler), {"token": FLEET["token"]}
    prefill = (*same, *SCHEDULERS[scheduler], "--profile", "constant:20ms", "--role", "prefill")
    decode = (*same, "--profile", "constant:2ms", "--role", "decode")
    with EngineProcess(*prefill, main=module_gate.options, **told) as p, EngineProcess(*decode, **told) as d:
        yield {"p": p, "d": d}


def asked(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 6,
        "ignore_eos": True,
        "kv_transfer_params": params,
        **more,
    }


class Prefill:
    """One under way: `offer` came with the headers, `ended` is set with the body."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.offer = orjson.loads(response.headers["x-slackline-kv-offer"])
        self.body = asyncio.ensure_future(response.json())

    @classmethod
    async def begin(cls, session: aiohttp.ClientSession, **more: Any) -> Prefill:
        response = await session.post(COMPLETIONS, json=asked(EARLY, max_tokens=1, **more))
        assert response.status == 200
        return cls(response)


async def usage(session: aiohttp.ClientSession) -> float:
    """Share of the engine's KV blocks that are taken."""
    return (await samples(session))["vllm:kv_cache_usage_perc", ""]


async def test_kv_moves_before_the_prefill_has_ended(sessions, gate):
    whole = await complete(sessions["d"], prompt=PROMPT, max_tokens=6, ignore_eos=True)
    before, kept = await kv_received(sessions["d"]), await usage(sessions["p"])
    prefill = await Prefill.begin(sessions["p"])
    assert "first_token" not in prefill.offer
    async with sessions["d"].post(COMPLETIONS, json=asked(prefill.offer, stream=True)) as response:
        assert response.status == 200, "blocks are reserved"
        await kv_has_come(sessions["d"], before + EARLY_BYTES)
        assert not prefill.body.done()
        gate.open()
        raw = await response.read()
    said = await prefill.body
    text = "".join(orjson.loads(event)["choices"][0]["text"] for event in events_of(raw)[:-1])
    assert text == whole["choices"][0]["text"]
    assert text.startswith(said["choices"][0]["text"])
    moved = moved_in(raw)
    assert moved.bytes == await kv_received(sessions["d"]) - before == WHOLE
    assert moved.early_bytes == EARLY_BYTES, "all but the last layer of what the last step computes"

    async def released() -> bool:
        return await usage(sessions["p"]) <= kept

    await until_on_loop(released, what="released once taken")


def moved_in(raw: bytes) -> KvMoved:
    comment = next(event for event in raw.split(b"\n\n") if event.startswith(b": kv "))
    moved = moved_from_json(orjson.loads(comment[5:]))
    assert moved is not None
    return moved


async def test_a_whole_answers_headers_come_with_its_kv(sessions, gate):
    before = await kv_received(sessions["d"])
    prefill = await Prefill.begin(sessions["p"])
    answer = asyncio.ensure_future(sessions["d"].post(COMPLETIONS, json=asked(prefill.offer, max_tokens=150)))
    await kv_has_come(sessions["d"], before + EARLY_BYTES)
    gate.open()
    async with await answer as response:
        assert not response.content.at_eof(), "150 steps of 2 ms are to come"
        moved = moved_from_json(orjson.loads(response.headers["x-slackline-kv"]))
        assert moved is not None
        assert moved.early_bytes == EARLY_BYTES
        whole = await response.json()
    assert whole["usage"]["completion_tokens"] == 150
    await prefill.body


async def test_a_prefill_that_is_aborted_ends_the_transfer_with_a_reason(sessions, gate):
    before = await kv_received(sessions["d"])
    prefill = await Prefill.begin(sessions["p"], request_id="gone")
    decode = asyncio.ensure_future(post(sessions["d"], COMPLETIONS, asked(prefill.offer)))
    await kv_has_come(sessions["d"], before + EARLY_BYTES)
    told, said = await post(sessions["p"], "/abort_requests", {**FLEET, "request_ids": ["gone"]})
    assert told == 200, said
    status, answer = await decode
    assert (status, answer["error"]["kv"]["reason"]) == (502, "kv_lost")
    assert (await prefill.body)["choices"][0]["finish_reason"] == "abort"
    assert await usage(sessions["d"]) == 0


async def test_of_a_stream_a_failed_transfer_is_an_error_inside_it(sessions, gate):
    prefill = await Prefill.begin(sessions["p"])
    lost = signed(prefill.offer | {"remote_port": 1})
    async with sessions["d"].post(COMPLETIONS, json=asked(lost, stream=True)) as response:
        assert response.status == 200
        raw = await response.read()
    assert raw.startswith(b'data: {"error"')
    assert orjson.loads(raw[6:])["error"]["kv"]["reason"] == "unreachable"
    assert b"[DONE]" not in raw
    gate.open()
    await prefill.body
    body = asked(prefill.offer, stream=True)
    async with sessions["d"].post(COMPLETIONS, json=body) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n"), "it can be pulled again"


async def test_who_does_not_ask_gets_no_early_offer(sessions):
    async with sessions["p"].post(COMPLETIONS, json=asked({"do_remote_decode": True}, max_tokens=1)) as response:
        assert "x-slackline-kv-offer" not in response.headers
        body = await response.json()
    assert body["kv_transfer_params"]["first_token"] >= 0


# ---- layer by layer, without engines --------------------------------------------------------------------------------


class WatchedProgress(KvProgress):
    """Counts how often the sender looked for something that was not there yet."""

    in_vain = 0

    def is_written(self, seq: Seq, layer: int, stop: int) -> bool:
        found = super().is_written(seq, layer, stop)
        self.in_vain += not found
        return found


class Source:
    """A sequence in the middle of its prefill: a step computes its tokens 32 to 64, and `passed` layers are done."""

    def __init__(self) -> None:
        self.passed = 0
        self.seq = Seq("s", 0.0, 64, 1, token_ids=list(range(64)), keep_kv=True, state=SeqState.RUNNING, computed=32)
        self.progress = WatchedProgress(lambda step_id: self.passed if step_id == 7 else 0)
        list(self.progress.began(Step(7, (StepChunk(self.seq, 32, 32, True),), (), 0)))

    def end(self) -> None:
        self.seq.computed, self.seq.output_tokens = 64, 1
        self.seq.token_ids.append(9)
        self.seq.state, self.seq.finish = SeqState.FINISHED, FinishReason.LENGTH


STORE = EmulatedKv(layers=4, token_bytes=64)


async def begin(
    source: Source, timeout_s: float = 5.0, listener: Listener = NOBODY
) -> tuple[asyncio.Task[Any], KvServer, Links, list[Seq]]:
    taken: list[Seq] = []
    server = KvServer(STORE, "t", {"s": source.seq}.get, taken.append, source.progress)
    await server.start("127.0.0.1", 0)
    links = Links(STORE, "t", KvTraffic(), timeout_s)
    target = Seq("t", 0.0, 64, 8, token_ids=[*range(64), 0], output_tokens=1)
    pulling = asyncio.ensure_future(links.pull(fleet_offer("127.0.0.1", server.port, "s", 64), target, listener))
    return pulling, server, links, taken


async def settled(source: Source, server: KvServer) -> int:
    """Bytes sent when the sender has looked twice more and found nothing to send."""
    enough = source.progress.in_vain + 2
    await until_on_loop(lambda: source.progress.in_vain >= enough)
    return server.traffic.sent_bytes


async def test_layers_go_as_the_running_step_passes_them():
    source = Source()
    pulling, server, links, taken = await begin(source)
    assert await settled(source, server) == 0
    source.passed = 1
    assert await settled(source, server) == 64 * 64, "the first layer, of all tokens: those of earlier steps too"
    await asyncio.sleep(0.3)
    source.passed = 3
    assert await settled(source, server) == 3 * 64 * 64
    assert not pulling.done()
    source.end()
    moved, first_token = await pulling
    assert (first_token, moved.bytes, moved.early_bytes) == (9, 4 * 64 * 64, 3 * 64 * 64)
    assert 0.3 < moved.span_s < moved.seconds, "with the pause after the first layer"
    began, ended, share = moved.pauses[:3]
    assert 0.3 <= began - ended < moved.span_s
    assert share == 0.25, "one of four layers had come"
    await until_on_loop(lambda: taken == [source.seq])
    links.close()
    server.close()


async def test_a_sequence_that_gave_its_blocks_back_is_waited_for():
    source = Source()
    pulling, server, links, _ = await begin(source)
    source.passed = 2
    await settled(source, server)
    source.passed, source.seq.computed, source.seq.state = 0, 0, SeqState.WAITING
    assert await settled(source, server) == 2 * 64 * 64
    source.end()
    moved, _ = await pulling
    assert moved.bytes == 4 * 64 * 64
    links.close()
    server.close()


async def test_waiting_for_a_long_prompt_is_no_stalled_transfer(monkeypatch):
    """Three times most of the patience with a silent source passes, and each time the source reports in between."""
    loop, skipped_s, reports = asyncio.get_running_loop(), 0.0, 0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + skipped_s)

    def reported() -> None:
        nonlocal reports
        reports += 1

    source = Source()
    pulling, server, links, _ = await begin(source, timeout_s=8.0, listener=Listener(still=reported))
    await settled(source, server)
    for count in (1, 2, 3):
        skipped_s += 6.0
        await until_on_loop(lambda count=count: reports >= count)
    assert not pulling.done()
    source.end()
    assert (await pulling)[1] == 9
    links.close()
    server.close()


async def test_a_source_that_says_for_ever_that_it_computes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(kv_server, "STILL_S", 0.05)
    monkeypatch.setattr(kv_links, "LONGEST_PREFILL_S", 0.5)
    source = Source()
    pulling, server, links, taken = await begin(source, timeout_s=0.3)
    with pytest.raises(KvTransferError) as raised:
        async with asyncio.timeout(5.0):
            await pulling
    assert (raised.value.reason, taken) == ("timeout", [])
    links.close()
    server.close()


async def test_a_receiver_that_goes_away_while_it_waits_is_not_waited_for():
    source = Source()
    pulling, server, links, taken = await begin(source)
    await settled(source, server)
    pulling.cancel()
    async with asyncio.timeout(0.8):  # sooner than the next word to it
        while not server.traffic.failed:
            await asyncio.sleep(0.01)
    source.end()
    await turns()
    assert (server.traffic.sent_bytes, taken) == (0, [])
    links.close()
    server.close()


async def test_a_prompt_whose_first_token_is_its_last_leaves_nothing_to_take_over():
    source = Source()
    pulling, server, links, taken = await begin(source)
    source.end()
    source.seq.finish = FinishReason.STOP
    with pytest.raises(KvTransferError, match="nothing") as raised:
        await pulling
    assert (raised.value.reason, taken) == ("refused", [])
    links.close()
    server.close()


@pytest.mark.parametrize("later", range(8))
async def test_a_client_that_hangs_up_as_its_kv_lands_leaves_a_working_engine(later):
    """At each turn of the loop around the end of the pull: the reservation is gone before the sequence can land."""
    engine, _ = make_engine()
    disaggregation = Disaggregation(engine, STORE, "t", "127.0.0.1")
    stream = Stream(Seq("s-1", 0.0, 4, 8, token_ids=[1, 2, 3, 4]), (), wake_each=True)
    loop = asyncio.get_running_loop()

    def hang_up(turns: int) -> None:
        engine.abort(stream.seq) if turns == 0 else loop.call_soon(hang_up, turns - 1)

    async def pull(offer: Offer, seq: Seq, listener: Listener) -> tuple[KvMoved, int]:
        hang_up(later)
        return KvMoved(), 7

    disaggregation.links.pull = pull
    disaggregation.reserve(stream, fleet_offer("h", 1, "r", 4))
    with suppress(HttpError):
        await disaggregation.take_over(stream, fleet_offer("h", 1, "r", 4))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not engine.failed
    assert stream.finish is FinishReason.ABORT
    engine.scheduler.check()


def test_progress_counts_only_sequences_that_others_take():
    plain = Seq("plain", 0.0, 64, 1)
    progress = KvProgress(lambda step_id: 4)
    assert list(progress.began(Step(1, (StepChunk(plain, 0, 64, True),), (), 0))) == []
    assert progress.coming(plain) == 0
    kept = Seq("kept", 0.0, 64, 1, keep_kv=True, state=SeqState.RUNNING)
    assert list(progress.began(Step(2, (StepChunk(kept, 0, 32, False),), (), 0))) == []
    assert (progress.coming(kept), progress.is_written(kept, 3, 32), progress.is_written(kept, 3, 33)) == (
        32,
        True,
        False,
    )
    assert list(progress.began(Step(3, (StepChunk(kept, 32, 32, True),), (), 0))) == [kept]
    progress.forget(kept)
    assert progress.coming(kept) == 0
