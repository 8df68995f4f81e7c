"""KV of another model or another layout, and first tokens that are none: refused before anything is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from controller.core.kv_links import LinkState
from controller.core.steps import FinishReason, Seq, SeqState
from tests.waiting import until_on_loop
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.test_engine import make_engine
from workers.engine.errors import HttpError
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import Links
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv, KvStore, Layout
from workers.engine.kv.transfer import KvConnection, KvTraffic, Offer
from workers.engine.kv.wire import KvTransferError
from workers.engine.text.streams import Stream

PROMPT = list(range(32))
VOCABULARY = 500


class Store(EmulatedKv):
    """Entries that nobody checks, as a real cache's, and a layout of the test's."""

    def __init__(self, **layout: object) -> None:
        known = Layout(4, 64, "bfloat16", 4, 8, VOCABULARY, "m")
        self._layout = known._replace(**layout)  # type: ignore[arg-type]
        super().__init__(self._layout.layers, self._layout.token_bytes)
        self.written = 0

    @property
    def layout(self) -> Layout:
        return self._layout

    def write(self, seq: Seq, layer: int, start: int, data: bytes) -> None:
        self.written += len(data)


class OldServer(KvServer):
    """Of an engine that knows of layers and sizes only, and of a `take` what it knows."""

    async def _give(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await super()._give({name: asked[name] for name in ("op", "request", "start")}, reader, writer)


class OldConnection(KvConnection):
    """Of such an engine, that pulls: it takes no answer but the one it knows."""

    async def _ask(self, question: dict[str, Any], *more: Any) -> dict[str, Any]:
        answer = await super()._ask({name: question[name] for name in question if name != "layout"}, *more)
        if question["op"] == "take":
            assert answer == {"layers": 4, "token_bytes": 64, "tokens": len(PROMPT)}
        return answer


@asynccontextmanager
async def served(
    store: KvStore, first_token: int = 7, of: type[KvServer] = KvServer
) -> AsyncIterator[tuple[KvServer, Offer]]:
    """A prompt that was prefilled by somebody with this store."""
    tokens = [*PROMPT, first_token]
    source = Seq("s", 0.0, len(PROMPT), 1, token_ids=tokens, keep_kv=True, computed=len(PROMPT), output_tokens=1)
    source.state, source.finish = SeqState.FINISHED, FinishReason.LENGTH
    server = of(store, "t", {"s": source}.get, lambda seq: None)
    await server.start("127.0.0.1", 0)
    yield server, fleet_offer("127.0.0.1", server.port, "s", len(PROMPT))
    server.close()


async def pulled(offer: Offer, store: KvStore) -> int:
    links = Links(store, "t", KvTraffic(), 5.0)
    try:
        target = Seq("t", 0.0, len(PROMPT), 8, token_ids=[*PROMPT, 0], output_tokens=1)
        return (await links.pull(offer, target))[1]
    finally:
        links.close()


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"kv_heads": 8},
        {"head_dim": 128},
        {"vocabulary": VOCABULARY + 1},
        {"model": "another"},
        {"layers": 5},
        {"token_bytes": 128},
    ],
    ids=str,
)
async def test_whatever_differs_is_named_and_nothing_is_written(other: dict[str, object]) -> None:
    target = Store()
    async with served(Store(**other)) as (server, offer):
        (name,) = other
        with pytest.raises(KvTransferError, match=f"another layout: {name} ") as raised:
            await pulled(offer, target)
        assert raised.value.reason == "other_model"
        assert (target.written, server.traffic.sent) == (0, 0)
        assert await pulled(offer, Store(**other)) == 7


async def test_no_link_is_blamed_for_kv_of_another_model() -> None:
    links = Links(Store(), "t", KvTraffic(), 5.0)
    async with served(Store(model="another")) as (_, offer):
        with pytest.raises(KvTransferError, match="another layout"):
            await links.pull(offer, Seq("t", 0.0, len(PROMPT), 8, token_ids=[*PROMPT, 0], output_tokens=1))
        await links.tried(5.0)
        (report,) = links.reports()
        assert (report.state, report.failures) == (LinkState.UP, 0)
    links.close()


async def test_an_offer_of_more_tokens_than_there_are_is_refused_and_no_other_model() -> None:
    async with served(Store()) as (_, offer):
        with pytest.raises(KvTransferError, match=f"tokens {len(PROMPT)} instead of {len(PROMPT) + 1}") as raised:
            await pulled(replace(offer, tokens=len(PROMPT) + 1), Store())
    assert raised.value.reason == "refused"


# ---- engines of two versions, while a fleet is upgraded ----------------------------------------------------------


async def test_an_older_engine_is_pulled_from_by_what_it_says() -> None:
    """Its model is another one for all that anybody knows: it was never asked."""
    target = Store()
    async with served(Store(model="unsaid"), of=OldServer) as (server, offer):

        async def confirmed() -> bool:
            return server.traffic.sent == 1

        assert await pulled(offer, target) == 7
        await until_on_loop(confirmed, what="it was told that all is there")
    assert target.written == 4 * 64 * len(PROMPT)


@pytest.mark.parametrize("other", [{"layers": 5}, {"token_bytes": 128}], ids=str)
async def test_of_an_older_engine_what_it_says_is_compared(other: dict[str, object]) -> None:
    async with served(Store(**other), of=OldServer) as (_, offer):
        with pytest.raises(KvTransferError, match="another layout") as raised:
            await pulled(offer, Store())
    assert raised.value.reason == "other_model"


async def test_an_older_engine_that_pulls_is_told_what_it_knows_and_no_more() -> None:
    target = Seq("t", 0.0, len(PROMPT), 8, token_ids=[*PROMPT, 0], output_tokens=1)
    store = Store()
    async with served(Store()) as (server, offer):
        connection = await OldConnection.open(offer.host, offer.port, "t", 5.0)
        assert (await connection.pull(offer, target, store, KvTraffic())).first_token == 7
        connection.close()
    assert store.written == server.traffic.sent_bytes == 4 * 64 * len(PROMPT)


@pytest.mark.parametrize("asked", [None, True, "model", {"model": 1}, [1, None, {}]], ids=str)
def test_whoever_asks_for_nothing_that_is_known_hears_what_everybody_hears(asked: object) -> None:
    assert Store().layout.as_json(asked) == {"layers": 4, "token_bytes": 64}


def test_what_is_asked_for_is_told_if_it_is_known() -> None:
    told = Store().layout.as_json(["model", "rope", "dtype"])
    assert told == {"layers": 4, "token_bytes": 64, "dtype": "bfloat16", "model": "m"}


async def test_emulated_engines_of_two_models_do_not_take_each_others() -> None:
    async with served(EmulatedKv(4, 64, "one")) as (_, offer):
        with pytest.raises(KvTransferError, match="model 'one' instead of 'two'"):
            await pulled(offer, EmulatedKv(4, 64, "two"))
        assert await pulled(offer, EmulatedKv(4, 64, "one")) == 7


@pytest.mark.parametrize("token", [0, VOCABULARY - 1])
async def test_a_token_of_the_vocabulary_is_taken(token: int) -> None:
    async with served(Store(), token) as (_, offer):
        assert await pulled(offer, Store()) == token


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**6])
async def test_a_first_token_that_is_none_is_an_error_and_the_engine_lives(token: int) -> None:
    engine, _ = make_engine()
    disaggregation = Disaggregation(engine, Store(), "t", "127.0.0.1")
    stream = Stream(Seq("s-1", 0.0, len(PROMPT), 8, token_ids=[*PROMPT]), (), wake_each=True)
    async with served(Store(), token) as (_, offer):
        disaggregation.reserve(stream, offer)
        with pytest.raises(HttpError, match=f"{token} is not a valid first token") as raised:
            await disaggregation.take_over(stream, offer)
    assert (raised.value.status, raised.value.extra["kv"]["reason"]) == (502, "corrupt")
    assert not engine.failed
    blocks = engine.scheduler.blocks
    assert (blocks.usage, blocks.cached_tokens(Seq("next", 0.0, len(PROMPT), 8, token_ids=[*PROMPT]))) == (0, 0)
    engine.scheduler.check()
    disaggregation.close()
