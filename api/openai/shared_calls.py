"""Equal requests of one tenant that share a call at an engine (`share_call`): one is computed, each gets its answer.

A call is an `InFlightRequest` of its own, which the runtime drives and nobody records: it is sent, retried and relayed
like any other. What it sends to its client is kept and written to each request that shares it, at the pace of each. A
request that comes while the call runs gets what was sent so far at once. While the call waits in the queue it is due
when the first of its requests is.

An engine that is sent everything ends a call that has not begun when the first of its requests has waited too long.
Only those that have end with it; for the others the call is sent again.

Each request has its own targets, its own place in the tenant's quotas and its own record. The tokens belong to the one
that has shared the call for longest: if its client goes, to the next. With the last of them the call ends.
"""

from __future__ import annotations

import asyncio
import copy
import math
from array import array
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import islice

from api.openai.asgi import Header, Message
from api.openai.in_flight import InFlightRequest, end_with_error
from api.openai.protocol.errors import ApiError, key_revoked, workflow_cancelled
from api.openai.protocol.response_streams import CheckedResponse, as_response
from api.openai.protocol.step_answers import Captured
from api.openai.runtime import Outcomes, Runtime, workflow_end
from controller.core.decisions import Decision, Figure
from controller.core.types import Outcome, Request
from controller.dispatch.dispatcher import RETRY_SAME_S
from controller.dispatch.lifecycle import ENDS, Cause, outcome
from controller.dispatch.suspects import HOLD_S
from controller.slo.sharing import call_for, first_workflow_s
from controller.wording.refusals import refusal

KEPT_BYTES = 256 << 10  # of an answer, for requests that come later: beyond it none joins
BEHIND_BYTES = 1 << 20  # that a client may be behind the engine: beyond it the engine waits, as for one request alone
MOST_SHARING = 256  # requests of one call: each token is written to all of them
RENEW_AFTER_S = max(RETRY_SAME_S, HOLD_S)  # after one has joined a call that failed: then it may go where it failed
LENGTH = b"content-length"


class Sharer:
    """A request that shares a call, and how much of the answer was written to it."""

    __slots__ = ("expires", "in_flight", "late", "read", "writer")

    def __init__(self, in_flight: InFlightRequest) -> None:
        self.in_flight = in_flight
        self.read = 0  # messages
        self.writer: asyncio.Task[None] | None = None
        self.expires: asyncio.TimerHandle | None = None  # its own waiting time
        self.late = False  # that was over while the call was at an engine

    @property
    def waits_until(self) -> float:
        return waits_until(self.in_flight)


class SharedCall:
    """A call and the requests that share it, the first one first. `joined`: how many ever did. `avoid`: as
    `Runtime.arrive` has it, of the first one, which may be of a branch."""

    def __init__(self, key: bytes, call: InFlightRequest, avoid: frozenset[str]) -> None:
        self.key = key
        self.call = call
        self.avoid = avoid
        self.sharers: list[Sharer] = []
        self.joined = 0
        self.shared_at = 0.0  # when a second request came; monotonic seconds
        self.renewed_at: int | None = None  # after how many attempts it is to be renewed for those who joined it since
        self.cut = False  # the start of the answer is not kept any more
        self._start: Message | None = None
        self._kept: list[bytes] = []
        self._dropped = 0  # messages before those kept
        self._bytes = 0
        self._done = False
        self._news = asyncio.Event()  # something was sent
        self._read = asyncio.Event()  # something was written to a client

    @property
    def joinable(self) -> bool:
        return not self.call.over and not self.cut and len(self.sharers) < MOST_SHARING

    @property
    def workflow_due(self) -> float:
        """When the first of their workflows is due that can be in time; infinite if one has no deadline."""
        requests = [sharer.in_flight.request for sharer in self.sharers]
        left_s = first_workflow_s(requests, self.call.request)
        return math.inf if left_s is None else self.call.request.arrival + left_s

    def late(self) -> list[Sharer]:
        return [sharer for sharer in self.sharers if sharer.late]

    async def send(self, message: Message) -> None:
        """The call's own `send`. Returns once no client is too far behind."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._kept.append(message.get("body", b""))
        self._bytes += len(self._kept[-1])
        self._done = not message.get("more_body")
        self._news.set()
        self._news = asyncio.Event()
        self._trim()
        while not self._done and self._bytes > BEHIND_BYTES and self.sharers:
            self._read.clear()
            await self._read.wait()
            self._trim()

    def _trim(self) -> None:
        """Drop what all have read of an answer that is too long to be kept."""
        if self._bytes <= KEPT_BYTES:
            return
        read = min((sharer.read for sharer in self.sharers), default=0) - self._dropped
        if read > 0:
            self.cut = True
            self._bytes -= sum(map(len, self._kept[:read]))
            del self._kept[:read]
            self._dropped += read

    def capture(self, captured: Captured) -> None:
        """The answer so far; too large to be kept if its start is gone."""
        captured.too_large = self.cut
        for raw in self._kept:
            captured.add(raw)

    def moved(self) -> None:
        """A client has read something, or is gone."""
        self._read.set()

    async def write(self, sharer: Sharer) -> None:
        """The whole answer to one client."""
        try:
            await self._write(sharer)
        finally:
            self.moved()

    async def _write(self, sharer: Sharer) -> None:
        in_flight = sharer.in_flight
        while not self._kept and not self._dropped:
            await self._news.wait()
        assert self._start is not None
        whole = any(name == LENGTH for name, _ in self._start["headers"])
        while whole and not self._done:
            await self._news.wait()
        reached(in_flight, self.call)
        answered = self._start["status"] == 200
        in_flight.started = answered and not whole
        translation = in_flight.translation if answered else None
        if whole:
            raw = b"".join(self._kept)
            raw = raw if translation is None else translation.translate(raw)
            length = (LENGTH, str(len(raw)).encode())
            headers = [length if name == LENGTH else (name, value) for name, value in self._headers(in_flight)]
            await in_flight.send({**self._start, "headers": headers})
            await in_flight.send({"type": "http.response.body", "body": raw, "more_body": False})
            return
        await in_flight.send({**self._start, "headers": self._headers(in_flight)})
        while True:
            raw = b"".join(islice(self._kept, sharer.read - self._dropped, None))
            raw = raw if translation is None else translation.translate(raw)
            sharer.read, last = self._dropped + len(self._kept), self._done
            await in_flight.send({"type": "http.response.body", "body": raw, "more_body": not last})
            self.moved()
            if last:
                return
            while sharer.read == self._dropped + len(self._kept) and not self._done:
                await self._news.wait()

    def _headers(self, in_flight: InFlightRequest) -> list[Header]:
        """Those of the call, with the request's own id, time in the queue and quota."""
        assert self._start is not None
        of_call = {name for name, _ in self.call.headers()}
        first = self.sharers[0].in_flight if self.sharers else in_flight
        shared = [] if first is in_flight else [(b"x-slackline-shared", first.request.id.encode())]
        others = [each for each in self._start["headers"] if each[0] not in of_call]
        return [*others, *in_flight.headers(), *shared]


class SharedCalls:
    """All calls of a gateway that are or may be shared. It stands between the runtime and the ledger: the ledger hears
    of the requests, and never of a call. `shared`: requests that got the answer of another's call, by tenant."""

    def __init__(self, ledger: Outcomes) -> None:
        self.runtime: Runtime
        self.shared: Counter[str] = Counter()
        self._ledger = ledger
        self._open: dict[bytes, SharedCall] = {}  # by what makes requests equal
        self._calls: dict[InFlightRequest, SharedCall] = {}
        self._of: dict[InFlightRequest, tuple[SharedCall, Sharer]] = {}

    # ---- requests -------------------------------------------------------------------------------------------------

    def arrive(self, in_flight: InFlightRequest, key: bytes, avoid: frozenset[str] = frozenset()) -> bool:
        """A request that may share. False: it shares a call that is in flight. `key`: of its tenant and its body.
        `avoid`: as the runtime has it, for a call of its own."""
        found = self._open.get(key)
        if found is None or not self._joins(found, in_flight):
            found = self._begin(in_flight, key, avoid)
        sharer = Sharer(in_flight)
        found.sharers.append(sharer)
        found.joined += 1
        self._of[in_flight] = (found, sharer)
        sharer.writer = self.runtime.spawn(found.write(sharer))
        if found.joined == 1:
            self.runtime.arrive(found.call, avoid)
            return True
        self._joined(found)
        return False

    def _joins(self, found: SharedCall, in_flight: InFlightRequest) -> bool:
        """False also for one that could not be ended in time: the engine was told to let the call wait for longer."""
        call = found.call
        if not found.joinable or call.started or not call.sends or self.runtime.waits(call):
            return found.joinable
        backend = self.runtime.backends.get(call.instance)
        return backend is None or not backend.spec.selects or waits_until(in_flight) >= call.waits_until

    def goes_on(self, call: InFlightRequest, until: float, decided: Callable[[Request], Decision]) -> Request | None:
        """Of the runtime: an engine, or the scheduler, ended a call that had waited too long. Ends those whose own
        waiting time is over at `until`, as `decided`, and returns the call for the others; None without others."""
        found = self._calls.get(call)
        if found is None:
            return None
        over = [sharer for sharer in found.sharers if sharer.waits_until <= until]
        if len(over) == len(found.sharers):
            return None
        for sharer in over:
            decision = decided(sharer.in_flight.request)
            self._end_with_error(sharer.in_flight, Cause.EXPIRED, expired(decision), decision)
        call.waits_until = min(sharer.waits_until for sharer in found.sharers)
        call.workflow_due = found.workflow_due
        requests = [sharer.in_flight.request for sharer in found.sharers]
        return call_for(requests, call.request, requests[-1].id)

    def _begin(self, in_flight: InFlightRequest, key: bytes, avoid: frozenset[str]) -> SharedCall:
        call = copy.copy(in_flight)
        found = self._open[key] = self._calls[call] = SharedCall(key, call, avoid)
        # Requests of other workflows may share it, and keys of other requests may be revoked.
        call.request = replace(in_flight.request, workflow="", stage="")
        call.key_id, call.charged_tokens, call.quota, call.timed = 0, 0, (), False
        call.waits_until = waits_until(in_flight)
        call.send, call.decisions, call.captured = found.send, None, None
        if in_flight.translation is not None:
            streamed = in_flight.streamed
            call.translation = CheckedResponse(as_response({}, call.request.id, call.arrived_wall, streamed=streamed))
        in_flight.head = b""  # of the call alone
        return found

    def _joined(self, found: SharedCall) -> None:
        newest = found.sharers[-1].in_flight
        newest.head = b""
        self.shared[newest.request.tenant] += 1
        if found.joined == 2:
            found.shared_at = self.runtime.clock()
            self._limit(found.sharers[0])
        self._limit(found.sharers[-1])
        if not found.call.sends:
            found.call.waits_until = min(sharer.waits_until for sharer in found.sharers)
            self._renew(found)
        elif self.runtime.waits(found.call):
            self._renew_later(found)

    def _renew(self, found: SharedCall) -> None:
        """The call gets the targets of all that share it now, if it waits."""
        if self._waits(found):
            shared = [sharer.in_flight.request for sharer in found.sharers]
            found.call.workflow_due = found.workflow_due
            avoid = frozenset() if found.call.sends else found.avoid  # once it failed there it may go elsewhere
            self.runtime.arrive_again(found.call, call_for(shared, found.call.request, shared[-1].id), avoid)

    def _renew_later(self, found: SharedCall) -> None:
        """The same, once the call may go where it failed: to arrive again now would forget that it may not yet."""
        if found.renewed_at is not None:
            return
        found.renewed_at = found.call.sends
        asyncio.get_running_loop().call_later(RENEW_AFTER_S, self._renew_failed, found)

    def _renew_failed(self, found: SharedCall) -> None:
        call, since = found.call, found.renewed_at
        found.renewed_at = None
        if call.over or call.started or not found.sharers:
            return
        if call.sends == since:
            self._renew(found)
        else:
            self._renew_later(found)  # it has failed again

    def requeued(self, call: InFlightRequest) -> None:
        """Of the runtime: an engine failed the call, which waits again. Requests end whose waiting time was over while
        it was there."""
        found = self._calls.get(call)
        if found is not None:
            if found.joined > 1:  # some may have joined while it was at the engine
                self._renew_later(found)
            for sharer in found.late():
                asyncio.get_running_loop().call_soon(self._expired, sharer)

    def _waits(self, found: SharedCall) -> bool:
        """Whether it may still get other targets. One that an operator has paused stays so."""
        if found.call.over or not self.runtime.waits(found.call):
            return False
        row = self.runtime.scheduler.queue().row(found.call.request.id)
        return row is None or not row["paused"]

    def _limit(self, sharer: Sharer) -> None:
        """Its own waiting time: the call waits for the one that waits longest."""
        left_s = sharer.waits_until - self.runtime.clock()
        if math.isfinite(left_s):
            sharer.expires = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expired, sharer)

    def _expired(self, sharer: Sharer) -> None:
        if not self._open_still(sharer.in_flight):
            return
        found, _ = self._of[sharer.in_flight]
        if not self.runtime.waits(found.call):
            sharer.late = True
            return
        now, request = self.runtime.clock(), sharer.in_flight.request
        row = self.runtime.scheduler.queue().row(found.call.request.id)
        lane = self.runtime.scheduler.dispatcher.lanes.get(request.model)
        figures: dict[str, Figure] = {
            "waited_s": now - request.arrival,
            "hopeless": row is not None and row["hopeless"],
            "paused": row is not None and row["paused"],
            "instances": sum(1 for instance in lane.instances.values() if instance.takes) if lane is not None else 0,
        }
        decision = Decision("expire", "waiting_time", request.id, now, figures)
        self._end_with_error(sharer.in_flight, Cause.EXPIRED, expired(decision), decision)

    # ---- ends of one of them --------------------------------------------------------------------------------------

    def hang_up(self, in_flight: InFlightRequest, why: str) -> None:
        """The client of a request is gone. The call goes on while others share it. `why`: as for the runtime."""
        if self._open_still(in_flight):
            self._leave(in_flight, Cause.HUNG_UP, code=why, status=499)

    def _open_still(self, in_flight: InFlightRequest) -> bool:
        """A call that is over takes all its requests along, a moment later."""
        return in_flight in self._of and not self._of[in_flight][0].call.over

    def end_revoked(self, key_ids: Container[int]) -> None:
        """As `Runtime.end_revoked`, of requests that share."""
        for in_flight in list(self._of):
            if in_flight.key_id in key_ids:
                self._end_with_error(in_flight, Cause.KEY_REVOKED, key_revoked())

    def end_workflow(self, tenant: str, workflow: str, by: str) -> None:
        """As `Runtime.end_workflow`, of requests that share."""
        cause, reason = workflow_end(by)
        for in_flight in list(self._of):
            request = in_flight.request
            if request.workflow == workflow and request.tenant == tenant:
                decision = Decision("cancel", reason, workflow, self.runtime.clock(), {})
                self._end_with_error(in_flight, cause, workflow_cancelled(workflow, by), decision)

    def _end_with_error(
        self, in_flight: InFlightRequest, cause: Cause, error: ApiError, decision: Decision | None = None
    ) -> None:
        if not self._open_still(in_flight):
            return
        started = in_flight.started
        self._leave(in_flight, cause, code=error.code, status=200 if started else error.status, decision=decision)
        self.runtime.spawn(end_with_error(in_flight, error, started=started))

    def _leave(
        self, in_flight: InFlightRequest, cause: Cause, *, code: str, status: int, decision: Decision | None = None
    ) -> None:
        found, sharer = self._of[in_flight]
        call = found.call
        how = outcome(cause, sent=call.sends > 0, answering=in_flight.started)
        found.sharers.remove(sharer)
        self._tell(found, in_flight, pays=not found.sharers)
        if decision is not None:
            self.runtime.note(in_flight, decision)
        self._forget(sharer)
        if sharer.writer is not None:
            sharer.writer.cancel()
        found.moved()
        self._ledger.ended(in_flight, how, self.runtime.clock(), code=code, status=status)
        if not found.sharers:
            self.runtime.hang_up(call)

    def _forget(self, sharer: Sharer) -> None:
        sharer.in_flight.over = True
        self._of.pop(sharer.in_flight)
        if sharer.expires is not None:
            sharer.expires.cancel()

    # ---- ends of the call -----------------------------------------------------------------------------------------

    def ended(
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None:
        """Of the runtime: a request or a call has ended, and all that share it with it."""
        found = self._calls.pop(in_flight, None)
        if found is None:
            self._ledger.ended(in_flight, outcome, now, code=code, status=status)
            return
        if self._open.get(found.key) is found:
            del self._open[found.key]
        for sharer in found.sharers:
            self._tell(found, sharer.in_flight, pays=sharer is found.sharers[0])
            self._forget(sharer)
        for sharer in found.sharers:
            self._ledger.ended(sharer.in_flight, outcome, now, code=code, status=status)

    def _tell(self, found: SharedCall, in_flight: InFlightRequest, *, pays: bool) -> None:
        """What the record of a request says of its call. `pays`: its tokens are this request's."""
        call = found.call
        reached(in_flight, call)
        in_flight.sends = call.sends if pays else 0
        in_flight.follows = not pays
        in_flight.usage, in_flight.output_tokens = call.usage, call.output_tokens
        in_flight.reasoning_tokens = call.reasoning_tokens
        if call.times is not None:
            arrival = in_flight.request.arrival  # what was out before it came was there at once
            in_flight.times = array("d", (max(at, arrival) for at in call.times))
        if in_flight.captured is not None:
            found.capture(in_flight.captured)
        if found.joined > 1:
            self._note_shared(found, in_flight, pays=pays)
        later = call.request.arrival - in_flight.request.arrival
        steps = [{**step, "at": round(step["at"] + later, 6)} for step in call.decisions or ()]
        in_flight.decisions = [*(in_flight.decisions or ()), *(step for step in steps if step["at"] >= 0)]

    def _note_shared(self, found: SharedCall, in_flight: InFlightRequest, *, pays: bool) -> None:
        request = in_flight.request
        figures: dict[str, Figure] = {"sharing": found.joined - 1}
        if not pays:
            figures = {"of_request": found.sharers[0].in_flight.request.id}
        reason = "call_shared" if pays else "shared_call"
        at = max(found.shared_at, request.arrival)
        self.runtime.note(in_flight, Decision("share", reason, request.id, at, figures))


def waits_until(in_flight: InFlightRequest) -> float:
    """When its own waiting time ends: monotonic seconds."""
    return in_flight.request.arrival + in_flight.request.targets.waiting_time_s


def expired(decision: Decision) -> ApiError:
    return ApiError(ENDS[Cause.EXPIRED].code, refusal(decision))


def reached(in_flight: InFlightRequest, call: InFlightRequest) -> None:
    """How far the call of a request has got."""
    in_flight.instance, in_flight.prefill_instance = call.instance, call.prefill_instance
    if call.sent_at is not None:
        in_flight.sent_at = max(call.sent_at, in_flight.request.arrival)
