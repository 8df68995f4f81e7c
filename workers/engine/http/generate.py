"""The two generation endpoints and the formats of their responses. A client that disconnects aborts its sequence."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson

from controller.core.steps import FinishReason, Seq
from controller.core.told_hints import estimate_of
from workers.engine import fields
from workers.engine.checkpoints import CheckpointLeases
from workers.engine.config import ServerConfig
from workers.engine.engine import Engine
from workers.engine.errors import HttpError
from workers.engine.http.asgi import JSON_TYPE, Exchange
from workers.engine.http.requests import Generation, RequestRules, parse_chat, parse_completion
from workers.engine.kv.disaggregation import FIELD, Disaggregation
from workers.engine.kv.transfer import Listener, Offer
from workers.engine.text.pseudo_text import seed_of
from workers.engine.text.streams import Stream

DONE = b"data: [DONE]\n\n"


def usage_of(seq: Seq) -> dict[str, Any]:
    return {
        "prompt_tokens": seq.prompt_tokens,
        "total_tokens": seq.tokens,
        "completion_tokens": seq.output_tokens,
        "prompt_tokens_details": {"cached_tokens": seq.cached},
    }


def waited_out() -> HttpError:
    told = "the request waited for longer than waiting_in allows"
    return HttpError(told, "waiting_in", status=503, extra={"reason": "waiting_time"})


class Format(ABC):
    """The format of a response. Both endpoints share it: a head, a choice that contains the text, a tail."""

    kind = ""
    chunk_kind = ""
    opening = b'"text":'
    closing = b',"logprobs":null,"finish_reason":'

    def __init__(self, name: str, model: str) -> None:
        self._head = {"id": name, "object": self.kind, "created": int(time.time()), "model": model}
        head = orjson.dumps({**self._head, "object": self.chunk_kind})[:-1]
        self._start = b"data: " + head
        self._choice = self._start + b',"choices":[{"index":0,' + self.opening

    def first(self) -> bytes:
        """The bytes before the event of the first token."""
        return b""

    def event(self, text: str, finish: FinishReason | None, stop_reason: str | int | None = None) -> bytes:
        if finish is None:
            return self._choice + orjson.dumps(text) + self.closing + b'null,"stop_reason":null}]}\n\n'
        tail = orjson.dumps(finish) + b',"stop_reason":' + orjson.dumps(stop_reason) + b"}]}\n\n"
        return self._choice + orjson.dumps(text) + self.closing + tail

    def usage_event(self, seq: Seq) -> bytes:
        return self._start + b',"choices":[],"usage":' + orjson.dumps(usage_of(seq)) + b"}\n\n"

    def body(
        self,
        text: str,
        seq: Seq,
        finish: FinishReason,
        stop_reason: str | int | None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        choice = {
            "index": 0,
            **self.message(text),
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop_reason,
        }
        return orjson.dumps({**self._head, "choices": [choice], "usage": usage_of(seq), **extra})

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """The part of a choice that contains the text."""


class CompletionFormat(Format):
    kind = chunk_kind = "text_completion"

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatFormat(Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening = b'"delta":{"content":'
    closing = b'},"logprobs":null,"finish_reason":'

    def first(self) -> bytes:
        """An event with the role and without a token."""
        choice = (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        )
        return self._start + choice + b"\n\n"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


Parser = Callable[[fields.Body, Mapping[bytes, bytes], RequestRules], Generation]
NO_CACHE = (b"cache-control", b"no-cache")
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MOVED_HEADER = b"x-slackline-kv"  # figures of the KV transfer: controller.core.kv_links.KvMoved as JSON
KV_BEGAN = b": kv-began\n\n"
BORROWED_HEADER = b"x-slackline-kv-prefix"  # how a prefix came: controller.core.kv_links.BorrowedKv as JSON
BORROWED = "kv_prefix"  # the same in the answer of a prefill
OFFER_HEADER = b"x-slackline-kv-offer"  # the offer of a prompt that is nearly computed


class Generator:
    """Serves the generation endpoints. `in_flight`: the number of requests that are being answered (for /load)."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        served: RequestRules,
        disaggregation: Disaggregation | None = None,
        checkpoints: CheckpointLeases | None = None,
    ) -> None:
        self._checkpoints = checkpoints or CheckpointLeases(engine)
        self._engine = engine
        self._served = served
        self._disaggregation = disaggregation
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
            if await self._borrowed(stream.seq, asked, watch):
                await self._answer(exchange, stream, form, asked)
        finally:
            self.in_flight -= 1
            watch.cancel()
            self._checkpoints.ended(stream.seq, asked.checkpoint_s)
            if self._disaggregation is not None and self._disaggregation.borrows:
                self._disaggregation.prefixes.forget(stream.seq)
            self._give_up(stream.seq)  # does nothing unless the response failed before its end

    async def _borrowed(self, seq: Seq, asked: Generation, gone: asyncio.Future[None]) -> bool:
        """Return once a prefix that other engines hold is here or on its way, or cannot be had. False: the client went
        away. It does not wait beyond its waiting time: then it begins at once, or not at all."""
        if self._disaggregation is None or not self._disaggregation.borrows or asked.offer is not None:
            return True
        fetching = asyncio.ensure_future(self._disaggregation.prefixes.fetch(seq))
        try:
            left_s = self._waiting_left_s(seq, asked)
            await asyncio.wait((fetching, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                fetching.result()
            return not gone.done()
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _answer(self, exchange: Exchange, stream: Stream, form: Format, asked: Generation) -> None:
        """Answer the request. Raises HttpError if nothing was queued."""
        if asked.prefill_only or asked.offer is not None:
            if self._disaggregation is None:
                raise HttpError(f"this engine has no KV transfers: {self._config.no_kv_transfers}", FIELD)
            if asked.offer is not None:
                await self._decode(exchange, stream, form, asked, asked.offer, self._disaggregation)
            else:
                await self._prefill(exchange, stream, form, asked, self._disaggregation)
            return
        self._submit(stream, asked)
        if asked.stream:
            await exchange.start(200, EVENT_STREAM, NO_CACHE)
            await self._stream(exchange, stream, form, asked)
            return
        await stream.ready()
        if stream.waited_out:
            raise waited_out()
        borrowed = self._borrowed_by(stream.seq)
        told = ((BORROWED_HEADER, orjson.dumps(borrowed)),) if borrowed else ()
        await exchange.answer(self._whole(stream, form), 200, JSON_TYPE, *told)

    def _borrowed_by(self, seq: Seq) -> dict[str, Any] | None:
        """How a prefix of this prompt came from another engine, once that has ended."""
        if self._disaggregation is None or not self._disaggregation.borrows:
            return None
        borrowed = self._disaggregation.prefixes.borrowed(seq)
        return None if borrowed is None else borrowed.as_json()

    def _submit(self, stream: Stream, asked: Generation) -> None:
        """Queue it, for at most as long as its waiting time says from its arrival on."""
        self._engine.submit(stream)
        if (wait_s := self._waiting_left_s(stream.seq, asked)) is not None:
            stream.expiry = asyncio.get_running_loop().call_later(wait_s, self._engine.end_if_waiting, stream)

    def _waiting_left_s(self, seq: Seq, asked: Generation) -> float | None:
        """Seconds in which it must begin; None: any time will do."""
        if not math.isfinite(asked.hints.waiting_s):
            return None
        return max(0.0, seq.arrival + asked.hints.waiting_s - self._engine.now())

    async def _prefill(
        self, exchange: Exchange, stream: Stream, form: Format, asked: Generation, disaggregation: Disaggregation
    ) -> None:
        """Prefill for another engine, which decodes. An early offer is sent in the headers of the response, whose body
        follows at the end."""
        disaggregation.begin(stream.seq)
        self._submit(stream, asked)
        early = asked.offers_early and disaggregation.has_room(stream.seq) and await disaggregation.ending(stream)
        if early:
            early_offer = orjson.dumps(disaggregation.early_offer(stream.seq))
            await exchange.start(200, JSON_TYPE, (OFFER_HEADER, early_offer))
        await stream.ready()
        if stream.waited_out:  # then it never began, and no early offer was made
            raise waited_out()
        borrowed = self._borrowed_by(stream.seq)
        told = {} if borrowed is None else {BORROWED: borrowed}
        body = self._whole(stream, form, {FIELD: disaggregation.offer(stream.seq), **told})
        if early:
            await exchange.write(body, more=False)
        else:
            await exchange.answer(body)

    async def _decode(
        self,
        exchange: Exchange,
        stream: Stream,
        form: Format,
        asked: Generation,
        offer: Offer,
        disaggregation: Disaggregation,
    ) -> None:
        """Decode with the KV of another engine. The headers of a stream are sent once blocks are reserved; then one
        comment when the KV transfer begins, and another one with its figures when it ends. The headers of a response
        that is not streamed are sent when the transfer has ended, and contain its figures."""
        disaggregation.reserve(stream, offer)
        if not asked.stream:
            moved = await disaggregation.take_over(stream, offer)
            await exchange.start(200, JSON_TYPE, (MOVED_HEADER, orjson.dumps(moved._asdict())))
            await stream.ready()
            await exchange.write(self._whole(stream, form), more=False)
            return
        await exchange.start(200, EVENT_STREAM, NO_CACHE)
        try:
            began = partial(exchange.write, KV_BEGAN)
            moved = await disaggregation.take_over(stream, offer, Listener(began))
        except HttpError as error:
            await exchange.write(b"data: " + error.body() + b"\n\n", more=False)
            return
        await exchange.write(b": kv %s\n\n" % orjson.dumps(moved._asdict()))
        await self._stream(exchange, stream, form, asked)

    def _give_up(self, seq: Seq) -> None:
        self._engine.abort(seq)
        if seq.keep_kv and self._disaggregation is not None:
            self._disaggregation.end(seq)

    def _sequence(self, asked: Generation) -> Seq:
        engine = self._engine
        seed = self._config.seed if asked.seed is None else asked.seed
        now = engine.now()
        seq = Seq(
            id=engine.next_id(asked.name),
            arrival=now,
            prompt_tokens=len(asked.tokens),
            max_tokens=asked.max_tokens,
            priority=asked.priority,
            min_tokens=asked.min_tokens,
            ignore_eos=asked.ignore_eos,
            stop_tokens=asked.stop_tokens,
            token_ids=asked.tokens,
            salt=asked.salt,
            seed=seed_of(seed, asked.tokens),
            sampling=asked.sampling,
            due=now + asked.ttft_s - asked.waited_s,
            ttft_s=asked.ttft_s,
            tpot_s=asked.tpot_s,
            value=asked.value,
            tenant=asked.hints.tenant,
            keep_kv=asked.prefill_only,
            checkpoint=asked.name.partition("-")[2] if asked.checkpoint_s else "",
            branch_of=asked.branch_of,
        )
        seq.estimate = estimate_of(asked.hints, seq, now)
        return seq

    async def _stream(self, exchange: Exchange, stream: Stream, form: Format, asked: Generation) -> None:
        """Send the events that follow the headers."""
        prefix, told = form.first(), False
        while True:
            await stream.ready()
            if stream.waited_out:
                await exchange.write(b"data: " + waited_out().body() + b"\n\n", more=False)
                return
            if not told and (borrowed := self._borrowed_by(stream.seq)) is not None:
                prefix, told = b": kv-prefix %s\n\n" % orjson.dumps(borrowed) + prefix, True
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

    def _whole(self, stream: Stream, form: Format, extra: Mapping[str, Any] | None = None) -> bytes:
        """The body of a response that is not streamed."""
        finish = stream.finish or FinishReason.ABORT
        return form.body("".join(stream.take()), stream.seq, finish, stream.stop_reason, extra or {})
