"""Responses that are kept: read, gone on from, deleted, and computed in the background, at any gateway.

Only tenants with a retention have any; each ends with it. An answer is kept before its last bytes are sent, so that its
client can go on from it at once. A background response is kept as open before its client gets its id; its gateway holds
a lease on it, and looks with each renewal whether it was cancelled or deleted elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson

from api.openai.asgi import Message, Send
from api.openai.in_flight import InFlightRequest
from api.openai.protocol.errors import ApiError
from api.openai.protocol.response_objects import ResponseObject, WholeResponse
from api.openai.protocol.response_streams import StreamedResponse
from api.openai.protocol.schemas import LONGEST_NAME, Item, KeptInput
from api.openai.response_events import EventLog
from api.openai.steps import MOST_WAITING, READ_S, Steps
from api.openai.tenants import Held
from workers.live import Dialogue, LiveUnavailable
from workers.log_lines import RepeatedLine
from workers.steps import LARGEST_BYTES
from workers.stored_responses import (
    KeptEvents,
    drop_events,
    end_response,
    extend_events,
    forget_response,
    keep_response,
    read_events,
    read_response,
    renew_response,
)

log = logging.getLogger(__name__)

RUN_S = 2.0  # longest that Redis may take, with the waiting of a tenant's calls for one another
RENEWED_AT_ONCE = 32  # leases
RENEW_S = 1.0  # between two renewals of a lease, in which it is seen that a response was cancelled elsewhere
CONFIRM = 1.5  # periods of renewal until a lease that is missing is looked for again
LOST = {"code": "server_error", "message": "The gateway that computed this response has died."}
END_BYTES = 1024  # what the end of a response without output may take beside what was stored at its start
TOO_LARGE = {"code": "server_error", "message": f"The response is too large to be stored (over {LARGEST_BYTES} bytes)."}


class StoredResponse(NamedTuple):
    """`input`: the conversation that `response` answers. `open`: it is computed in the background. `events`: how many
    it told before its end, once it has ended well; None: it is not streamed in the background."""

    open: bool
    response: dict[str, Any]
    input: list[Item]
    events: int | None = None

    def ended(self, status: str, error: Mapping[str, Any] | None = None) -> StoredResponse:
        return self._replace(open=False, response={**self.response, "status": status, "error": error})

    def items(self) -> list[Item]:
        """The conversation with the answer."""
        return [*self.input, *self.response["output"]]


class StoredResponses:
    """`steps` keeps them. `counts`: what came of reads and writes, by its word."""

    def __init__(self, steps: Steps, now: Callable[[], float], hang_up: Callable[[InFlightRequest, str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.open: dict[tuple[str, str], InFlightRequest] = {}  # background ones of this gateway, by tenant and id
        self.logs: dict[tuple[str, str], EventLog] = {}  # of those that are streamed
        self._held: dict[tuple[str, str], Held] = {}  # their bodies, until they have ended
        self._steps = steps
        self._now = now
        self._hang_up = hang_up
        self._not_kept = RepeatedLine(log, "a response was not kept: %s")
        self._not_dropped = RepeatedLine(log, "events of a response were not dropped: %s")

    # ---- read -----------------------------------------------------------------------------------------------------

    async def find(
        self, tenant: str, response_id: str, field: str = "response_id", *, confirmed: bool = False
    ) -> StoredResponse:
        """Raises ApiError that names `field` if this tenant has no such response. One that a dead gateway left open has
        failed: it has no lease in two looks, of which `confirmed` is the second."""
        retention_s = self._steps.retentions.get(tenant, 0)
        asks = retention_s and len(response_id) <= LONGEST_NAME
        raw, leased = await self._read(tenant, response_id) if asks else (None, False)
        leased = leased or (tenant, response_id) in self.open
        try:
            told = orjson.loads(raw or b"null")
            found = StoredResponse(told["open"], told["response"], told["input"], told.get("events"))
            # An open one without a lease may be computed all the same (below).
            gone = self._now() - told["kept_at"] > retention_s and not (found.open and (leased or not confirmed))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            gone = True
        if gone:
            self.counts["unknown"] += 1
            told = f"{field}: this tenant has no stored response {response_id[:100]!r}."
            raise ApiError("not_found", told, param=field)
        if found.open and not leased:
            if not confirmed:  # a lease may be late, as after Redis was away: its gateway renews it within RENEW_S
                await asyncio.sleep(CONFIRM * RENEW_S)
                return await self.find(tenant, response_id, field, confirmed=True)
            failed = found.ended("failed", LOST)
            if await self._run(tenant, self._end(tenant, response_id, failed, retention_s)) != "kept":
                return await self.find(tenant, response_id, field, confirmed=True)  # it has ended meanwhile
            self.counts["lost"] += 1
            return failed
        self.counts["found"] += 1
        return found

    async def before(self, tenant: str, response_id: str) -> list[Item]:
        """The conversation that a new response goes on from. Raises ApiError."""
        field = "previous_response_id"
        found = await self.find(tenant, response_id, field)
        if found.response["status"] not in ("completed", "incomplete"):
            told = f"{field}: that response is {found.response['status']}, so there is no answer to go on from."
            raise ApiError("invalid_value", told, param=field)
        return found.items()

    async def _read(self, tenant: str, response_id: str) -> tuple[bytes | None, bool]:
        found: tuple[bytes | None, bool] = await self._run(tenant, read_response(tenant, response_id))
        return found

    async def _run(self, tenant: str, dialogue: Dialogue[Any]) -> Any:
        """Raises ApiError while Redis is unavailable."""
        board = self._steps.board
        try:
            if board is None:
                raise LiveUnavailable("this gateway runs alone")
            async with asyncio.timeout(RUN_S), self._steps.lane(tenant).reads:
                return await board.run(dialogue)
        except (LiveUnavailable, TimeoutError):
            self.counts["unread"] += 1
            raise unavailable() from None

    # ---- write ----------------------------------------------------------------------------------------------------

    async def keep(self, tenant: str, response: dict[str, Any], conversation: Sequence[Item]) -> bool:
        """A response that has ended well. False: it could not be kept, as while Redis hangs: its client waits for
        this, so that it takes READ_S at most."""
        board, retention_s = self._steps.board, self._steps.retentions.get(tenant, 0)
        if board is None or not retention_s:
            return False
        raw = self._raw(StoredResponse(False, response, list(conversation)))
        if len(raw) > LARGEST_BYTES:
            self.counts["too_large"] += 1
            return False
        lane = self._steps.lane(tenant)
        if lane.waiting >= MOST_WAITING:
            self.counts["too_many_waiting"] += 1
            return False
        lane.waiting += 1
        try:
            async with asyncio.timeout(READ_S), lane.writes:
                came = await board.run(keep_response(tenant, response["id"], raw, retention_s))
        except (LiveUnavailable, TimeoutError) as error:
            self._not_kept.write(error or "Redis did not answer in time")
            came = "unwritten"
        finally:
            lane.waiting -= 1
        self.counts[came] += 1
        return came == "kept"

    def _raw(self, stored: StoredResponse) -> bytes:
        name = str(stored.response["id"]).removeprefix("resp_")
        named, known = [], set[str]()
        for at, item in enumerate(stored.input):
            own = item.get("id")  # a client may send an item twice, and pages go by ids
            item_id = own if isinstance(own, str) and own not in known else f"item_{name}_{at}"
            known.add(item_id)
            named.append({**item, "id": item_id})
        told = {"open": stored.open, "kept_at": self._now(), "response": stored.response, "input": named}
        if stored.events is not None:
            told["events"] = stored.events
        return orjson.dumps(told)

    def _end(self, tenant: str, response_id: str, ended: StoredResponse, retention_s: float) -> Dialogue[str]:
        raw = self._raw(ended)
        if len(raw) > LARGEST_BYTES:
            raw = self._raw(ended._replace(response={**ended.response, "output": []}).ended("failed", TOO_LARGE))
        return end_response(tenant, response_id, raw, retention_s)

    # ---- delete and cancel ----------------------------------------------------------------------------------------

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError."""
        await self.find(tenant, response_id)
        await self._run(tenant, forget_response(tenant, response_id))
        self.counts["forgotten"] += 1
        self._stop(tenant, response_id, "response_deleted")

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """What it is then: cancelled, or as it had ended before. Raises ApiError."""
        found = await self.find(tenant, response_id)
        if not found.response["background"]:
            told = "response_id: only a response that was asked for with background true can be cancelled."
            raise ApiError("invalid_value", told, param="response_id")
        if not found.open:
            return found.response
        cancelled = found.ended("cancelled")
        retention_s = self._steps.retentions.get(tenant, 0)
        if await self._run(tenant, self._end(tenant, response_id, cancelled, retention_s)) != "kept":
            return (await self.find(tenant, response_id)).response
        self._stop(tenant, response_id, "response_cancelled")
        return cancelled.response

    def _stop(self, tenant: str, response_id: str, why: str) -> None:
        """`why`: the error code of its record."""
        in_flight = self._close(tenant, response_id)
        if in_flight is not None:
            self._hang_up(in_flight, why)

    def _close(self, tenant: str, response_id: str) -> InFlightRequest | None:
        held = self._held.pop((tenant, response_id), None)
        if held is not None:
            held.give_back()
        log_of_it = self.logs.pop((tenant, response_id), None)
        if log_of_it is not None:
            log_of_it.end()
        return self.open.pop((tenant, response_id), None)

    # ---- in the background ----------------------------------------------------------------------------------------

    async def begin(self, in_flight: InFlightRequest, answer: BackgroundAnswer) -> dict[str, Any]:
        """The response as its client gets it now. Raises ApiError, and then nothing is computed."""
        tenant, begun = in_flight.request.tenant, answer.response.begun()
        name = (tenant, begun["id"])
        stored = StoredResponse(True, begun, answer.kept.items, answer.begin(partial(self._log, *name)))
        self._held[name] = answer.held
        try:
            retention_s = self._steps.retentions.get(tenant, 0)
            raw = self._raw(stored)
            if len(raw) > LARGEST_BYTES - END_BYTES:
                self.counts["too_large"] += 1
                most = LARGEST_BYTES - END_BYTES
                told = f"background: what is stored of the request takes {len(raw)} bytes, and may take {most} at most."
                raise ApiError("invalid_value", told, param="background")
            came = await self._run(tenant, keep_response(*name, raw, retention_s))
            if came != "kept":
                told = "background: what this tenant keeps leaves no room for another response."
                raise ApiError("rate_limit_exceeded", told, param="background", retry_after_s=5.0)
            self.open[name] = in_flight  # not before it is stored, or `watch` would take it for one that was deleted
            await self._run(tenant, renew_response(*name, retention_s))
            if answer.log is not None:
                await self._begin_log(name, answer.log)
        except BaseException:
            answer.begun.cancel()
            self._close(*name)
            self._hang_up(in_flight, "response_unstored")
            raise
        answer.begun.set_result(stored)
        return begun

    def _log(self, tenant: str, response_id: str) -> EventLog:
        name = (tenant, response_id)
        return EventLog(partial(self._extend, name), partial(self._drop, name))

    async def _begin_log(self, name: tuple[str, str], log_of_it: EventLog) -> None:
        """Its first events are kept with it: one without any has lost them."""
        self.logs[name] = log_of_it
        if not await log_of_it.flush():
            told = "background: the events of this response cannot be kept now. Try again shortly, or without stream."
            raise ApiError("responses_unavailable", told, param="background", retry_after_s=1.0)
        log_of_it.start()

    async def _extend(self, name: tuple[str, str], at: int, more: bytes) -> str | None:
        retention_s = self._steps.retentions.get(name[0], 0) or 1
        try:
            came: str = await self._run(name[0], extend_events(*name, at, more, retention_s))
        except ApiError:
            return None
        if came in ("full", "too_large"):
            self.counts["events_dropped"] += 1
        return came

    async def _drop(self, name: tuple[str, str]) -> None:
        try:
            await self._run(name[0], drop_events(*name))
        except ApiError as error:  # whoever reads them sees that there are too few
            self._not_dropped.write(error)

    async def look(self, tenant: str, response_id: str, at: int) -> KeptEvents:
        """What is kept of its events, after so many bytes. Raises ApiError while Redis is unavailable."""
        found: KeptEvents = await self._run(tenant, read_events(tenant, response_id, at))
        return found

    async def settle(self, tenant: str, stored: StoredResponse) -> None:
        """A background response has ended. Until Redis answers, it is tried again while its lease could be held."""
        name = (tenant, str(stored.response["id"]))
        retention_s = self._steps.retentions.get(tenant, 0)
        if (log_of_it := self.logs.get(name)) is not None:
            await log_of_it.close()
            stored = stored._replace(events=log_of_it.next)
        for _ in range(SETTLE_TRIES):
            try:
                self.counts[await self._run(tenant, self._end(*name, stored, retention_s))] += 1
                break
            except ApiError:
                await asyncio.sleep(RENEW_S)
        if log_of_it is not None and log_of_it.lost:
            await self._drop(name)
        self._close(*name)

    async def watch(self) -> None:
        """Until cancelled: leases are renewed, and what was cancelled or deleted elsewhere ends."""
        while True:
            await asyncio.sleep(RENEW_S)
            opened = list(self.open.items())
            for at in range(0, len(opened), RENEWED_AT_ONCE):
                await asyncio.gather(*(self._renew(*each) for each in opened[at : at + RENEWED_AT_ONCE]))

    async def _renew(self, name: tuple[str, str], in_flight: InFlightRequest) -> None:
        if self._steps.board is None:
            return
        retention_s = self._steps.retentions.get(name[0], 0) or 1  # without one it has been forgotten
        try:
            if await self._steps.board.run(renew_response(*name, retention_s)):
                return
            raw, _ = await self._steps.board.run(read_response(*name))
        except LiveUnavailable as error:
            log.debug("a lease of a response was not renewed: %s", error)
            return
        if self.open.get(name) is in_flight:
            self._stop(*name, ended_by(raw))


SETTLE_TRIES = 8


def unavailable() -> ApiError:
    told = "Stored responses cannot be read or changed now. Try again shortly."
    return ApiError("responses_unavailable", told, retry_after_s=1.0)


def ended_by(raw: bytes | None) -> str:
    """The error code of a background response that its gateway finds ended. `raw`: what is stored of it now."""
    if raw is None:
        return "response_deleted"
    try:
        status = orjson.loads(raw)["response"]["status"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        status = None
    return "response_cancelled" if status == "cancelled" else "response_lost"


class KeepingAnswer:
    """The `send` of a response that is kept with what it answers, before the last of it goes out. If it could not be,
    that last part says so in `store`."""

    def __init__(self, responses: StoredResponses, tenant: str, kept: KeptInput, send: Send) -> None:
        self.response: ResponseObject
        self._responses = responses
        self._tenant = tenant
        self._kept: KeptInput | None = kept
        self._send = send
        self._missing = False
        self._body: bytes | None = None

    async def __call__(self, message: Message) -> None:
        if self._kept is not None and self.response.whole is not None:
            items, self._kept = self._kept.items, None
            self._missing = not await self._responses.keep(self._tenant, self.response.whole, items)
        await self._send(self._told(message) if self._missing else message)

    def _told(self, message: Message) -> Message:
        """Of the whole answer, whose length comes first, or of the last event of a stream."""
        whole = {**(self.response.whole or {}), "store": False}
        if message["type"] == "http.response.start":
            self._body = orjson.dumps(whole)
            length = (b"content-length", str(len(self._body)).encode())
            headers = [length if name == length[0] else (name, value) for name, value in message["headers"]]
            return {**message, "headers": headers}
        if self._body is not None:
            return {**message, "body": self._body}
        before, event, last = message.get("body", b"").rpartition(b"event: response.%s\n" % whole["status"].encode())
        if not event:
            return message
        fields = orjson.loads(last.removeprefix(b"data: "))
        last = b"data: " + orjson.dumps({**fields, "response": whole}) + b"\n\n"
        return {**message, "body": before + event + last}


class BackgroundAnswer:
    """The `send` of a background response, whose client may go. `begun`: what is kept of it while it is open. `held`:
    its body, until it has ended. `log`: its events, if it is streamed."""

    def __init__(self, responses: StoredResponses, tenant: str, kept: KeptInput, held: Held) -> None:
        self.translation: StreamedResponse | WholeResponse
        self.kept = kept
        self.begun: asyncio.Future[StoredResponse] = asyncio.get_running_loop().create_future()
        self.log: EventLog | None = None
        self._responses = responses
        self._tenant = tenant
        self.held = held
        self._streams = False
        self._said = bytearray()

    @property
    def response(self) -> ResponseObject:
        return self.translation.response

    def begin(self, make: Callable[[], EventLog]) -> int | None:
        """`StoredResponse.events`, as it begins. One that is streamed has its first events before it is computed."""
        if isinstance(self.translation, WholeResponse):
            return None
        self.log = make()
        self.log.add(self.translation.begin())
        return 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = message["status"] == 200
            return
        if self.log is not None and self._streams:
            self.log.add(message.get("body", b""))
        elif self.response.whole is None:
            self._said += message.get("body", b"")
        if not message.get("more_body"):
            stored = await self.begun
            await self._responses.settle(self._tenant, self._ended(stored))

    def _ended(self, stored: StoredResponse) -> StoredResponse:
        ended = self.response.whole or self.response.broken
        if ended is None:
            try:
                error = orjson.loads(bytes(self._said))["error"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                error = {}
            ended = self.response.failed([], error)
        return stored._replace(open=False, response=ended)
