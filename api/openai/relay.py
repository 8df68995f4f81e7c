"""From the engine to the client: bytes as they come, first-token and inter-token times taken once, here.

Nothing reaches the client before the first token (a chat stream's opening event is held back until then), so that a
request whose engine dies early can run elsewhere. After it, a failure ends the stream with one error event in OpenAI's
shape and without `[DONE]`: clients that look for `[DONE]` see an incomplete answer, those that parse events see why.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Protocol

from api.openai.asgi import EVENT_STREAM, NO_CACHE, respond
from api.openai.in_flight import InFlightRequest
from api.openai.protocol.errors import ApiError
from controller.dispatch.lifecycle import State
from workers.backends.base import AnswerChunk, Backend, EngineError, UpstreamCall


class RelayListener(Protocol):
    """Who hears what happens to a request at its engine."""

    def clock(self) -> float: ...

    def accepted(self, in_flight: InFlightRequest) -> None: ...

    def pulling(self, in_flight: InFlightRequest) -> None: ...

    def first_token(self, in_flight: InFlightRequest, now: float) -> None: ...

    def progressed(self, in_flight: InFlightRequest, now: float) -> None: ...

    def completed(self, in_flight: InFlightRequest, now: float) -> None: ...

    def lost(self, in_flight: InFlightRequest, error: EngineError) -> None: ...


async def relay(in_flight: InFlightRequest, backend: Backend, call: UpstreamCall, driver: RelayListener) -> None:
    """One attempt on one engine. Cancelling it closes the call upstream."""
    held = b""
    try:
        async with aclosing(backend.generate(call)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.kind == "data":
                    in_flight.moved = chunk.moved or in_flight.moved
                    if chunk.pulling:
                        driver.pulling(in_flight)
                    held = await _data(in_flight, chunk, held, driver)
                elif chunk.kind == "body":
                    await _whole(in_flight, chunk, driver)
                else:
                    in_flight.moved = chunk.moved
                    driver.accepted(in_flight)
    except EngineError as error:
        if in_flight.state is not State.ENDED:
            driver.lost(in_flight, error)


async def _data(in_flight: InFlightRequest, chunk: AnswerChunk, held: bytes, driver: RelayListener) -> bytes:
    """Relay whole events; the answer is what must still be held back."""
    if chunk.tokens:
        first, now = in_flight.times is None, driver.clock()
        in_flight.delivered(chunk.tokens, now)
        driver.first_token(in_flight, now) if first else driver.progressed(in_flight, now)
    if chunk.usage is not None:
        in_flight.usage = chunk.usage
    if in_flight.state is State.SENT:
        if not chunk.tokens and not chunk.done:
            return held + chunk.raw
        await start_stream(in_flight)
    raw = _told(in_flight, held + chunk.raw)
    if chunk.done:
        driver.completed(in_flight, driver.clock())
    if raw or chunk.done:
        await in_flight.send({"type": "http.response.body", "body": raw, "more_body": not chunk.done})
    return b""


async def start_stream(in_flight: InFlightRequest) -> None:
    in_flight.state = State.ANSWERING
    headers = [EVENT_STREAM, NO_CACHE, *in_flight.headers()]
    await in_flight.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _whole(in_flight: InFlightRequest, chunk: AnswerChunk, driver: RelayListener) -> None:
    raw = _told(in_flight, chunk.raw)
    in_flight.usage = chunk.usage
    in_flight.state = State.ANSWERING
    driver.completed(in_flight, driver.clock())
    await respond(in_flight.send, 200, raw, in_flight.headers())


def _told(in_flight: InFlightRequest, raw: bytes) -> bytes:
    return raw if in_flight.translation is None else in_flight.translation.told(raw)


async def end_with_error(in_flight: InFlightRequest, error: ApiError, *, started: bool) -> None:
    """Answer an error: as a response, or as the last event of a stream that has begun."""
    if started:
        await in_flight.send(
            {"type": "http.response.body", "body": _told(in_flight, error.event()), "more_body": False}
        )
    else:
        headers = [*in_flight.headers(), *error.headers()]
        await respond(in_flight.send, error.status, error.body(), headers)
