"""The two generation endpoints. A client that hangs up aborts its sequence in the scheduler at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import orjson

from controller.core.steps import FinishReason, Release, Seq
from workers.engine import fields
from workers.engine.config import ServerConfig
from workers.engine.engine import Engine
from workers.engine.errors import ApiError
from workers.engine.formats import DONE, ChatFormat, CompletionFormat, Format
from workers.engine.handover import FIELD, Handover
from workers.engine.http import JSON_TYPE, Exchange
from workers.engine.pseudo_text import seed_of
from workers.engine.requests import Generation, Served, parse_chat, parse_completion
from workers.engine.streams import Stream

Parser = Callable[[fields.Body, Mapping[bytes, bytes], Served], Generation]
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MOVED_HEADER = b"x-slackline-kv"  # how the KV of this answer came: controller.core.links.KvMoved as JSON


class Generator:
    """`in_flight` counts requests being answered (for /load)."""

    def __init__(self, engine: Engine, config: ServerConfig, served: Served, handover: Handover | None = None) -> None:
        self._engine = engine
        self._served = served
        self._handover = handover
        self._config = config
        self.in_flight = 0

    async def completions(self, exchange: Exchange) -> None:
        await self._serve(exchange, parse_completion)

    async def chat(self, exchange: Exchange) -> None:
        await self._serve(exchange, parse_chat)

    async def _serve(self, exchange: Exchange, parse: Parser) -> None:
        asked = parse(await exchange.json(), exchange.headers, self._served)
        decoder = self._served.tokenizer.decoder()
        stream = Stream(self._sequence(asked), asked.stops, asked.stream, asked.keep_stop, decoder)
        form = (ChatFormat if asked.chat else CompletionFormat)(asked.name, self._served.model)
        watch = asyncio.ensure_future(exchange.disconnected())
        watch.add_done_callback(lambda _: self._engine.abort(stream.seq))
        self.in_flight += 1
        try:
            told = await self._begin(stream, asked)
            if asked.stream:
                await self._stream(exchange, stream, form, asked, *told)
            else:
                await self._whole(exchange, stream, form, *told)
        finally:
            self.in_flight -= 1
            watch.cancel()
            self._give_up(stream.seq)  # nothing to do unless the response failed half-way

    async def _begin(self, stream: Stream, asked: Generation) -> list[tuple[bytes, bytes]]:
        """Headers that say how its KV came, if it came from elsewhere. Raises ApiError before anything is queued."""
        if (asked.offer or asked.hands_over) and self._handover is None:
            raise ApiError("this engine moves no KV: it was started without FLEET_TOKEN", FIELD)
        if asked.offer is not None and self._handover is not None:
            moved = await self._handover.take_over(stream, asked.offer)
            return [(MOVED_HEADER, orjson.dumps(moved._asdict()))]
        self._engine.submit(stream)
        return []

    def _give_up(self, seq: Seq) -> None:
        self._engine.abort(seq)
        if seq.keep_kv and self._handover is not None and not self._handover.keeps(seq):
            self._engine.handle(Release(seq))

    def _sequence(self, asked: Generation) -> Seq:
        engine = self._engine
        seed = self._config.seed if asked.seed is None else asked.seed
        now = engine.now()
        return Seq(
            id=engine.next_id(asked.name),
            arrival=now,
            prompt_tokens=len(asked.tokens),
            max_tokens=asked.max_tokens,
            priority=asked.priority,
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            token_ids=asked.tokens,
            salt=asked.salt,
            seed=seed_of(seed, asked.tokens),
            sampling=asked.sampling,
            due=now + asked.ttft_s - asked.waited_s,
            ttft_s=asked.ttft_s,
            tpot_s=asked.tpot_s,
            value=asked.value,
            keep_kv=asked.hands_over,
        )

    async def _stream(
        self, exchange: Exchange, stream: Stream, form: Format, asked: Generation, *told: tuple[bytes, bytes]
    ) -> None:
        await exchange.start(200, EVENT_STREAM, (b"cache-control", b"no-cache"), *told)
        prefix = form.first()
        while True:
            await stream.ready()
            data = prefix + self._events(stream, form)
            prefix = b""
            if stream.finish is not None:
                usage = form.usage_event(stream.seq) if asked.include_usage else b""
                await exchange.write(data + usage + DONE, more=False)
                return
            await exchange.write(data)

    def _events(self, stream: Stream, form: Format) -> bytes:
        pieces, finish = stream.take(), stream.finish
        if finish is None:
            return b"".join([form.event(text, None) for text in pieces])
        last = pieces.pop() if pieces and finish is not FinishReason.ABORT else ""
        events = [form.event(text, None) for text in pieces]
        return b"".join([*events, form.event(last, finish, stream.stop_reason)])

    async def _whole(self, exchange: Exchange, stream: Stream, form: Format, *told: tuple[bytes, bytes]) -> None:
        await stream.ready()
        finish = stream.finish or FinishReason.ABORT
        extra = {}
        if stream.seq.keep_kv and self._handover is not None:
            extra = {FIELD: self._handover.offer(stream.seq)}
        body = form.body("".join(stream.take()), stream.seq, finish, stream.stop_reason, extra)
        await exchange.answer(body, 200, JSON_TYPE, *told)
