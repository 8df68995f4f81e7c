"""KV from a prefill engine to a decode engine: two real processes, and every way the transfer can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from controller.core.kv_links import KvMoved
from controller.core.steps import FinishReason, Seq, SeqState
from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, post, samples, streamed
from tests.workers.engine.offers import fleet_offer, signed
from tests.workers.engine.process import EngineProcess, fleet
from workers.engine.kv.links import Links
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv, KvMismatch
from workers.engine.kv.transfer import KvTraffic, Offer
from workers.engine.kv.wire import KvTransferError

PROMPT = list(range(10, 90))
OPTIONS = ("--profile", "constant:2ms", "--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64")
KV = ("--kv-layers", "3", "--kv-token-bytes", "1024", "--shutdown-timeout", "0")


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    prefill = (*OPTIONS, *KV, "--role", "prefill", "--kv-lease", "1")
    decode = (*OPTIONS, *KV, "--role", "decode", "--kv-timeout", "2")
    return {"prefill": prefill, "decode": decode}


@pytest.fixture(scope="module")
def engines(engines: dict[str, EngineProcess]) -> Iterator[dict[str, EngineProcess]]:
    """And one without the fleet's token."""
    with EngineProcess(*OPTIONS, "--shutdown-timeout", "0") as alone:
        yield {**engines, "alone": alone}


async def prefill(sessions: dict[str, aiohttp.ClientSession], **body: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **body}
    return await complete(sessions["prefill"], **asked)


async def test_a_handed_over_answer_is_the_one_a_single_engine_gives(sessions):
    whole = await complete(sessions["alone"], prompt=PROMPT, max_tokens=12, ignore_eos=True)
    first = await prefill(sessions)
    chunks = await streamed(
        sessions["decode"],
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "kv_transfer_params": first["kv_transfer_params"]},
    )
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
    assert text.startswith(first["choices"][0]["text"])


async def test_the_kv_is_released_once_taken_and_cannot_be_taken_twice(sessions):
    offer = (await prefill(sessions, prompt=PROMPT[::-1]))["kv_transfer_params"]
    body = {"prompt": PROMPT[::-1], "max_tokens": 3, "kv_transfer_params": offer}
    status, _ = await post(sessions["decode"], COMPLETIONS, body)
    assert status == 200
    status, answer = await post(sessions["decode"], COMPLETIONS, body)
    assert status == 502
    assert "refused" in answer["error"]["message"]
    assert answer["error"]["param"] == "kv_transfer_params"


async def test_kv_no_one_takes_goes_after_its_lease(sessions):
    before = (await samples(sessions["prefill"]))["vllm:kv_cache_usage_perc", ""]
    offers = [(await prefill(sessions, prompt=[n] * 70))["kv_transfer_params"] for n in range(3)]
    assert all(offer["remote_num_tokens"] == 70 for offer in offers)
    assert (await samples(sessions["prefill"]))["vllm:kv_cache_usage_perc", ""] > before
    async with asyncio.timeout(5):
        while (await samples(sessions["prefill"]))["vllm:kv_cache_usage_perc", ""] > before:
            await asyncio.sleep(0.1)


async def test_a_prompt_that_fills_the_context_but_one_token_is_not_handed_over(sessions):
    """A decode engine could add nothing to its first token."""
    before = (await samples(sessions["prefill"]))["vllm:kv_cache_usage_perc", ""]
    for params in ({"do_remote_decode": True}, {"do_remote_decode": True, "early": True}):
        answer = await prefill(sessions, prompt=[7] * 511, kv_transfer_params=params)
        assert (answer["kv_transfer_params"], answer["choices"][0]["finish_reason"]) == (None, "length")
    assert (await samples(sessions["prefill"]))["vllm:kv_cache_usage_perc", ""] == before


async def test_a_wrong_offer_is_refused_with_the_field(sessions):
    good = (await prefill(sessions))["kv_transfer_params"]
    for change, field in (
        ({"remote_port": 0}, "kv_transfer_params.remote_port"),
        ({"remote_num_tokens": 7}, "kv_transfer_params"),
        ({"first_token": "x"}, "kv_transfer_params.first_token"),
        ({"remote_request_id": 3}, "kv_transfer_params.remote_request_id"),
    ):
        body = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": {**good, **change}}
        status, answer = await post(sessions["decode"], COMPLETIONS, body)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_a_source_that_is_gone_is_an_error_and_frees_the_blocks(sessions):
    offer = signed((await prefill(sessions))["kv_transfer_params"] | {"remote_port": 1})
    body = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": offer}
    status, answer = await post(sessions["decode"], COMPLETIONS, body)
    assert (status, "unreachable" in answer["error"]["message"]) == (502, True)
    assert (await samples(sessions["decode"]))["vllm:kv_cache_usage_perc", ""] == 0


async def test_no_room_is_said_at_once(sessions):
    offer = (await prefill(sessions, prompt=[99] * 500))["kv_transfer_params"]
    running = [
        asyncio.create_task(complete(sessions["decode"], prompt=[n] * 400, max_tokens=100, ignore_eos=True))
        for n in range(12)
    ]
    async with asyncio.timeout(5):
        while (await samples(sessions["decode"]))["vllm:kv_cache_usage_perc", ""] < 0.7:
            await asyncio.sleep(0.01)
    body = {"prompt": [99] * 500, "max_tokens": 3, "kv_transfer_params": offer}
    status, answer = await post(sessions["decode"], COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (503, "kv_transfer_params")
    await asyncio.gather(*running)


async def test_an_engine_without_the_fleets_token_says_it_cannot(sessions):
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    status, answer = await post(sessions["alone"], COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_prefill_needs_one_token_and_no_stream(sessions):
    body = {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": {"do_remote_decode": True}}
    status, answer = await post(sessions["prefill"], COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.do_remote_decode")


# ---- the wire, without engines --------------------------------------------------------------------------------------

STORE = EmulatedKv(layers=4, token_bytes=64)
FIRST = 5  # the token that the prefill sampled


def seq(tokens: list[int], computed: int = 0) -> Seq:
    made = Seq("s", 0.0, len(tokens), 8, token_ids=tokens)
    made.computed = computed
    return made


def prefilled(tokens: list[int]) -> Seq:
    made = seq([*tokens, FIRST], computed=len(tokens))
    made.prompt_tokens, made.output_tokens = len(tokens), 1
    made.state, made.finish = SeqState.FINISHED, FinishReason.LENGTH
    return made


async def pull(offer: Offer, target: Seq, store: EmulatedKv, token: str, timeout_s: float) -> KvMoved:
    links = Links(store, token, KvTraffic(), timeout_s)
    try:
        moved, first_token = await links.pull(offer, target)
        assert first_token == FIRST
        return moved
    finally:
        links.close()


@asynccontextmanager
async def serving(store: EmulatedKv = STORE, token: str = "t") -> AsyncIterator[tuple[KvServer, Offer, list[Seq]]]:
    source, taken = prefilled(PROMPT), []
    server = KvServer(store, token, {"s": source}.get, taken.append)
    await server.start("127.0.0.1", 0)
    yield server, fleet_offer("127.0.0.1", server.port, "s", len(PROMPT), 5), taken
    server.close()


async def test_a_cached_prefix_is_not_sent_again():
    async with serving() as (server, offer, taken):
        target = seq(PROMPT)
        target.cached = 64
        await pull(offer, target, STORE, "t", 5)
        await until_on_loop(lambda: taken)
        assert server.traffic.sent_bytes == 4 * 64 * (80 - 64)
        assert len(taken) == 1


async def test_without_the_fleets_token_nothing_is_given():
    async with serving() as (server, offer, taken):
        wrong = fleet_offer(offer.host, offer.port, offer.request, offer.tokens, token="wrong")
        with pytest.raises(KvTransferError, match="token") as raised:
            await pull(wrong, seq(PROMPT), STORE, "wrong", 5)
        assert raised.value.reason == "refused"
        assert (server.traffic.sent_bytes, taken) == (0, [])


async def test_another_layout_is_refused():
    async with serving() as (_, offer, taken):
        with pytest.raises(KvTransferError, match="layout"):
            await pull(offer, seq(PROMPT), EmulatedKv(5, 64), "t", 5)
        assert taken == []


async def test_kv_of_other_tokens_is_noticed():
    async with serving() as (_, offer, taken):
        with pytest.raises(KvTransferError) as raised:
            await pull(offer, seq([1] * len(PROMPT)), STORE, "t", 5)
        assert raised.value.reason == "corrupt"
        assert taken == []


async def test_a_transfer_cut_in_the_middle_can_be_pulled_again():
    class Cut(EmulatedKv):
        left = 2

        def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
            if layer == 2 and Cut.left:
                Cut.left -= 1
                raise ConnectionResetError("cable pulled")
            return super().read(seq, layer, start, stop)

    async with serving(Cut(4, 64)) as (_, offer, taken):
        for _ in range(2):
            with pytest.raises(KvTransferError) as raised:
                await pull(offer, seq(PROMPT), STORE, "t", 5)
            assert raised.value.reason == "cut"
        await pull(offer, seq(PROMPT), STORE, "t", 5)
        await until_on_loop(lambda: taken)
        assert len(taken) == 1


async def test_a_source_that_hangs_is_given_up():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    offer = fleet_offer("127.0.0.1", server.sockets[0].getsockname()[1], "s", 80, 5)
    with pytest.raises(KvTransferError) as raised:
        await pull(offer, seq(PROMPT), STORE, "t", 0.2)
    assert raised.value.reason == "timeout"
    server.close()


def test_emulated_entries_tell_tokens_and_layers_apart():
    source = seq([1, 2, 3])
    assert STORE.read(source, 0, 0, 3) != STORE.read(source, 1, 0, 3)
    assert len(STORE.read(source, 0, 1, 3)) == 2 * 64
    with pytest.raises(KvMismatch):
        STORE.write(source, 0, 1, STORE.read(source, 0, 0, 1))


async def test_a_prefill_that_waits_too_long_is_ended():
    """Its engine computes one request at a time, and that one takes longer."""
    with fleet(prefill=(*OPTIONS, *KV, "--max-num-seqs", "1")) as engines:
        async with aiohttp.ClientSession(engines["prefill"].url) as http:
            body = {"prompt": [7] * 20, "max_tokens": 400, "ignore_eos": True}
            running = asyncio.ensure_future(complete(http, **body))
            await asyncio.sleep(0.1)
            asked = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            status, said = await post(http, COMPLETIONS, {**asked, "waiting_in": 0.2})
            assert (status, said["error"]["param"]) == (503, "waiting_in"), said
            assert not running.done(), "its slot was taken all the time"
            await running
            assert (await samples(http))["vllm:kv_cache_usage_perc", ""] == 0.0
            await complete(http, **asked, waiting_in=0.2)  # what begins in time is not ended
