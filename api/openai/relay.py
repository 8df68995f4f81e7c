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

    def accepted(self, flight: InFlightRequest) -> None: ...

    def pulling(self, flight: InFlightRequest) -> None: ...

    def first_token(self, flight: InFlightRequest, now: float) -> None: ...

    def progressed(self, flight: InFlightRequest, now: float) -> None: ...

    def completed(self, flight: InFlightRequest, now: float) -> None: ...

    def lost(self, flight: InFlightRequest, error: EngineError) -> None: ...


async def relay(flight: InFlightRequest, backend: Backend, call: UpstreamCall, driver: RelayListener) -> None:
    """One attempt on one engine. Cancelling it closes the call upstream."""
    held = b""
    try:
        async with aclosing(backend.generate(call)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.kind == "data":
                    flight.moved = chunk.moved or flight.moved
                    if chunk.pulling:
                        driver.pulling(flight)
                    held = await _data(flight, chunk, held, driver)
                elif chunk.kind == "body":
                    await _whole(flight, chunk, driver)
                else:
                    flight.moved = chunk.moved
                    driver.accepted(flight)
    except EngineError as error:
        if flight.state is not State.ENDED:
            driver.lost(flight, error)


async def _data(flight: InFlightRequest, chunk: AnswerChunk, held: bytes, driver: RelayListener) -> bytes:
    """Relay whole events; the answer is what must still be held back."""
    if chunk.tokens:
        first, now = flight.times is None, driver.clock()
        flight.delivered(chunk.tokens, now)
        driver.first_token(flight, now) if first else driver.progressed(flight, now)
    if chunk.usage is not None:
        flight.usage = chunk.usage
    if flight.state is State.SENT:
        if not chunk.tokens and not chunk.done:
            return held + chunk.raw
        await start_stream(flight)
    raw = _told(flight, held + chunk.raw)
    if chunk.done:
        driver.completed(flight, driver.clock())
    if raw or chunk.done:
        await flight.send({"type": "http.response.body", "body": raw, "more_body": not chunk.done})
    return b""


async def start_stream(flight: InFlightRequest) -> None:
    flight.state = State.ANSWERING
    headers = [EVENT_STREAM, NO_CACHE, *flight.headers()]
    await flight.send({"type": "http.response.start", "status": 200, "headers": headers})


async def _whole(flight: InFlightRequest, chunk: AnswerChunk, driver: RelayListener) -> None:
    raw = _told(flight, chunk.raw)
    flight.usage = chunk.usage
    flight.state = State.ANSWERING
    driver.completed(flight, driver.clock())
    await respond(flight.send, 200, raw, flight.headers())


def _told(flight: InFlightRequest, raw: bytes) -> bytes:
    return raw if flight.translation is None else flight.translation.told(raw)


async def end_with_error(flight: InFlightRequest, error: ApiError, *, started: bool) -> None:
    """Answer an error: as a response, or as the last event of a stream that has begun."""
    if started:
        await flight.send({"type": "http.response.body", "body": _told(flight, error.event()), "more_body": False})
    else:
        headers = [*flight.headers(), *error.headers()]
        await respond(flight.send, error.status, error.body(), headers)
