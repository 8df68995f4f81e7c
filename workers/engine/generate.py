"""The two generation endpoints. A client that hangs up aborts its sequence in the scheduler at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from controller.core.steps import FinishReason, Seq
from workers.engine import fields
from workers.engine.config import ServerConfig
from workers.engine.engine import Engine
from workers.engine.formats import DONE, ChatFormat, CompletionFormat, Format
from workers.engine.http import Exchange
from workers.engine.pseudo_text import seed_of
from workers.engine.requests import Generation, parse_chat, parse_completion
from workers.engine.streams import Stream

Parser = Callable[[fields.Body, Mapping[bytes, bytes], str, int], Generation]
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Generator:
    """`in_flight` counts requests being answered (for /load)."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self.in_flight = 0

    async def completions(self, exchange: Exchange) -> None:
        await self._serve(exchange, parse_completion)

    async def chat(self, exchange: Exchange) -> None:
        await self._serve(exchange, parse_chat)

    async def _serve(self, exchange: Exchange, parse: Parser) -> None:
        model, context = self._config.model, self._config.engine.max_model_len
        asked = parse(await exchange.json(), exchange.headers, model, context)
        stream = Stream(self._sequence(asked), asked.stops, asked.stream, asked.keep_stop)
        self._engine.submit(stream)
        form = (ChatFormat if asked.chat else CompletionFormat)(asked.name, model)
        watch = asyncio.ensure_future(exchange.disconnected())
        watch.add_done_callback(lambda _: self._engine.abort(stream.seq))
        self.in_flight += 1
        try:
            await (self._stream(exchange, stream, form, asked) if asked.stream else self._whole(exchange, stream, form))
        finally:
            self.in_flight -= 1
            watch.cancel()
            self._engine.abort(stream.seq)  # nothing to do unless the response failed half-way

    def _sequence(self, asked: Generation) -> Seq:
        engine = self._engine
        seed = self._config.seed if asked.seed is None else asked.seed
        return Seq(
            id=engine.next_id(asked.name),
            arrival=engine.now(),
            prompt_tokens=len(asked.tokens),
            max_tokens=asked.max_tokens,
            priority=asked.priority,
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            token_ids=asked.tokens,
            salt=asked.salt,
            seed=seed_of(seed, asked.tokens),
        )

    async def _stream(self, exchange: Exchange, stream: Stream, form: Format, asked: Generation) -> None:
        await exchange.start(200, EVENT_STREAM, (b"cache-control", b"no-cache"))
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

    async def _whole(self, exchange: Exchange, stream: Stream, form: Format) -> None:
        await stream.ready()
        finish = stream.finish or FinishReason.ABORT
        await exchange.answer(form.body("".join(stream.take()), stream.seq, finish, stream.stop_reason))
