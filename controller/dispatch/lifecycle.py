"""The states of a request, the transitions between them and the ways to end, for scheduler, gateway and simulator.

`STEPS` is the table of transitions. Requests and their KV transfers take them by `Followed.follow`, and nothing else
changes a state. An event without a transition in a state is ignored there: for example a stale event of an attempt that
has ended. `ENDS` is the table of outcomes. Drivers read both and add no rule of their own.
docs/reference/request-lifecycle.md shows both tables, and a test compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from controller.core import events as ev
from controller.core.types import CLIENT_CLOSED, ENGINE_REJECTED, Outcome, Request

MAX_PREFILLS = 3  # of one request, not counting those after which `PrefillAgain.counts` is False


class State(StrEnum):
    """One engine serves the whole request (SENT, ANSWERING), or a prefill and a decode instance do (PREFILLING to
    RELEASED). Each of the latter states has a time-out (`MigratorConfig`) and a rollback after a time-out or a failure.
    """

    QUEUED = "queued"  # waits for an instance
    SENT = "sent"  # one engine serves it; no token yet
    ANSWERING = "answering"  # the client has a token: no second attempt
    PREFILLING = "prefilling"  # Rollback: the prefill is aborted and runs again on another instance
    WAITING = "waiting"  # for a decode instance. Rollback: the request is given up and its KV freed
    PLACED = "placed"  # sent to a decode instance. Rollback: aborted there, another instance is chosen
    RESERVED = "reserved"  # the decode instance reserved blocks; the KV transfer has not begun. Rollback: the same
    MOVING = "moving"  # the KV transfer runs. Rollback: the same
    COMMITTED = "committed"  # the decode instance has the KV. Time-out: the prefill instance frees its copy
    RELEASED = "released"  # the prefill instance has freed its copy
    ENDED = "ended"

    def __init__(self, _: str) -> None:
        self.steps: dict[str, State] = {}  # STEPS by event; faster than a dict keyed by members


class On:
    """Causes of transitions: events that drivers report, and actions that they perform."""

    SEND = "Send"
    SEND_PREFILL = "Send (prefill)"
    SEND_PAIR = "Send (pair)"  # prefill and decode begin together, once a decode instance is chosen
    REFUSE = "Refuse"
    DROP = "Drop"
    UNSCHEDULED = "Unscheduled"
    ENDS_ENGINES = "Refuse (it ends engines)"
    FIRST_TOKEN = "FirstToken"
    FINISHED = "Finished"
    CANCELLED = "Cancelled"
    FAILED = "Failed"  # before the first token
    CUT = "Fail (after a token)"
    UNREADABLE = "Fail (unreadable answer)"
    REJECTED = "Fail (rejected)"  # the engine refuses the request itself
    ANSWERED_WHOLE = "AnsweredWhole"
    PREFILL_ENDING = "PrefillEnding"
    PREFILL_DONE = "PrefillDone"
    PLACE = "Place"
    STARTED = "TransferStarted"
    MOVES = "TransferMoves"  # or TransferStarted of an engine that pulls at once
    DONE = "TransferDone"
    RELEASED = "KvReleased"
    UNDONE = "TransferFailed or time-out"
    PREFILL_AGAIN = "PrefillAgain"
    GIVE_UP = "GiveUp"


class Transition(NamedTuple):
    state: State
    on: str
    to: State


UNDER_WAY = (State.PLACED, State.RESERVED, State.MOVING)  # a decode instance was chosen but does not have the KV yet
LANDED = (State.COMMITTED, State.RELEASED)
TRANSFER_STATES = (*UNDER_WAY, *LANDED)  # of a KV transfer, in their order
TWO_STAGES = (State.PREFILLING, State.WAITING, *UNDER_WAY, *LANDED)
UNDECODED = (State.PREFILLING, State.WAITING, State.RELEASED)  # where no decode stage runs, or one whose KV is lost
OPEN = (State.QUEUED, State.SENT, State.ANSWERING, *TWO_STAGES)

STEPS: tuple[Transition, ...] = (
    # one engine for the whole answer
    Transition(State.QUEUED, On.SEND, State.SENT),
    Transition(State.SENT, On.FIRST_TOKEN, State.ANSWERING),
    Transition(State.SENT, On.FINISHED, State.ENDED),
    Transition(State.ANSWERING, On.FINISHED, State.ENDED),
    # one to prefill, another to decode
    Transition(State.QUEUED, On.SEND_PREFILL, State.PREFILLING),
    Transition(State.QUEUED, On.SEND_PAIR, State.WAITING),
    Transition(State.PREFILLING, On.PREFILL_ENDING, State.WAITING),
    Transition(State.PREFILLING, On.PREFILL_DONE, State.WAITING),
    Transition(State.WAITING, On.PLACE, State.PLACED),
    Transition(State.PLACED, On.STARTED, State.RESERVED),
    Transition(State.PLACED, On.MOVES, State.MOVING),
    Transition(State.RESERVED, On.MOVES, State.MOVING),
    *(Transition(state, On.DONE, State.COMMITTED) for state in UNDER_WAY),
    Transition(State.COMMITTED, On.RELEASED, State.RELEASED),
    *(Transition(state, On.FINISHED, State.ENDED) for state in (*UNDER_WAY, *LANDED)),
    # rolled back in the batch that also says that its answer has ended
    *(Transition(state, On.FINISHED, State.ENDED) for state in (State.QUEUED, State.WAITING)),
    # the prefill instance produced the whole answer
    *(Transition(state, On.ANSWERED_WHOLE, State.SENT) for state in TWO_STAGES),
    # back: another decode instance, another prefill, or the queue
    *(Transition(state, On.UNDONE, State.WAITING) for state in (State.WAITING, *UNDER_WAY, State.COMMITTED)),
    *(Transition(state, On.PREFILL_AGAIN, State.QUEUED) for state in UNDECODED),
    *(Transition(state, On.FAILED, State.QUEUED) for state in (State.SENT, *TWO_STAGES)),
    # the other ends
    *(Transition(State.QUEUED, on, State.ENDED) for on in (On.REFUSE, On.DROP, On.UNSCHEDULED)),
    *(Transition(state, On.ENDS_ENGINES, State.ENDED) for state in (State.QUEUED, State.SENT, *TWO_STAGES)),
    *(Transition(state, On.GIVE_UP, State.ENDED) for state in UNDECODED),
    *(Transition(state, On.CUT, State.ENDED) for state in (State.ANSWERING, *LANDED)),
    *(Transition(state, On.UNREADABLE, State.ENDED) for state in (State.SENT, *LANDED)),
    *(Transition(state, On.REJECTED, State.ENDED) for state in (State.SENT, *TWO_STAGES)),
    *(Transition(state, On.CANCELLED, State.ENDED) for state in OPEN),
)

for _step in STEPS:
    _step.state.steps[_step.on] = _step.to


class Cause(StrEnum):
    """Why a request ended: an action of the scheduler, or something that a driver saw."""

    ANSWERED = "answered"  # its last token was sent
    REFUSED = "refused"  # Refuse
    EXPIRED = "expired"  # Drop: its waiting time ran out
    CANCELLED = "cancelled by an operator"  # Drop, or the driver heard that its workflow was
    UNSCHEDULED = "unscheduled"  # Unscheduled
    NOT_DECODED = "not decoded"  # GiveUp: no decode instance could take it
    KV_LOST = "KV lost"  # GiveUp: prefilled too often
    ENGINE_FAILED = "engine failed"  # Fail: after a token, or in a way that another attempt would not mend
    REJECTED = "rejected by the engine"  # Fail: the request itself is at fault
    HUNG_UP = "client hung up"
    KEY_REVOKED = "key revoked"  # or its tenant was deactivated
    WORKFLOW_CANCELLED = "workflow cancelled"  # by its client
    SHUTDOWN = "gateway stopped"
    CUT_OFF = "simulation stopped"


class End(NamedTuple):
    """How requests end for one cause, by how far they got. `code`: the error code of the answer; "": another one."""

    never_sent: Outcome
    sent: Outcome  # to an engine, but its client has no token
    answering: Outcome  # its client has a token
    code: str = ""


ENDS: Mapping[Cause, End] = {
    Cause.ANSWERED: End(Outcome.OK, Outcome.OK, Outcome.OK),
    Cause.REFUSED: End(Outcome.REFUSED, Outcome.FAILED, Outcome.CUT),  # the action has the code
    Cause.EXPIRED: End(Outcome.EXPIRED, Outcome.EXPIRED, Outcome.CUT, "waiting_time_exceeded"),
    Cause.CANCELLED: End(Outcome.REFUSED, Outcome.REFUSED, Outcome.CUT, "cancelled"),
    Cause.UNSCHEDULED: End(Outcome.FAILED, Outcome.FAILED, Outcome.CUT, "internal_error"),
    Cause.NOT_DECODED: End(Outcome.FAILED, Outcome.FAILED, Outcome.CUT, "no_capacity"),
    Cause.KV_LOST: End(Outcome.FAILED, Outcome.FAILED, Outcome.CUT, "no_capacity"),
    Cause.ENGINE_FAILED: End(Outcome.FAILED, Outcome.FAILED, Outcome.CUT, "engine_failed"),
    Cause.REJECTED: End(Outcome.REFUSED, Outcome.REFUSED, Outcome.REFUSED, ENGINE_REJECTED),
    Cause.HUNG_UP: End(Outcome.CANCELLED, Outcome.CANCELLED, Outcome.CANCELLED, CLIENT_CLOSED),
    Cause.KEY_REVOKED: End(Outcome.REFUSED, Outcome.REFUSED, Outcome.CUT, "invalid_api_key"),
    Cause.WORKFLOW_CANCELLED: End(Outcome.CANCELLED, Outcome.CANCELLED, Outcome.CANCELLED, "cancelled"),
    Cause.SHUTDOWN: End(Outcome.REFUSED, Outcome.FAILED, Outcome.CUT, "shutting_down"),
    Cause.CUT_OFF: End(Outcome.EXPIRED, Outcome.EXPIRED, Outcome.CUT),
}


def outcome(cause: Cause, *, sent: bool, answering: bool) -> Outcome:
    """`sent`: to an engine at least once. `answering`: its client has a token."""
    end = ENDS[cause]
    return end.answering if answering else end.sent if sent else end.never_sent


def cause_of(action: ev.Refuse | ev.Drop | ev.Unscheduled | ev.GiveUp | ev.Fail) -> Cause:
    """The cause that an action of the scheduler stands for when it ends a request."""
    if isinstance(action, ev.Refuse):
        return Cause.REFUSED
    if isinstance(action, ev.Drop):
        return Cause.CANCELLED if action.decision.kind == "cancel" else Cause.EXPIRED
    if isinstance(action, ev.GiveUp):
        return Cause.KV_LOST if action.prefilled else Cause.NOT_DECODED
    if isinstance(action, ev.Fail):
        return Cause.REJECTED if action.rejected else Cause.ENGINE_FAILED
    return Cause.UNSCHEDULED


def after(state: State, on: str) -> State | None:
    """The next state, or None if `on` has no transition in `state`."""
    return state.steps.get(on)


class Followed:
    """What goes through the table. Only `follow` changes its state."""

    __slots__ = ("state",)

    def __init__(self, state: State) -> None:
        self.state = state

    def follow(self, on: str) -> bool:
        """Take the transition. False if `on` has none in the present state."""
        to = self.state.steps.get(on)
        if to is None:
            return False
        self.state = to
        return True


class OpenRequest(Followed):
    """A request that has not ended. `source`: the instance that serves or prefills it, `target`: the one that decodes
    it, "" for none. `answering`: its client has a token, so there is no second attempt. `landed`: the target confirmed
    that it has the KV. `paired`: both stages begin together."""

    __slots__ = ("answering", "landed", "paired", "request", "source", "target")

    def __init__(self, request: Request) -> None:
        super().__init__(State.QUEUED)
        self.request = request
        self.source = ""
        self.target = ""
        self.answering = False
        self.landed = False
        self.paired = False


class Sent:
    """A request at an engine, as the scheduler follows it. `produced`: output tokens so far; `first_at` is None
    while it waits for its prefill."""

    __slots__ = (
        "assumed",
        "at",
        "binds",
        "counted",
        "expected_s",
        "first_at",
        "mark",
        "new_tokens",
        "prefill_s",
        "produced",
        "rank",
        "request",
        "squares",
        "to_come",
    )

    def __init__(self, request: Request, at: float, rank: int, prefill_s: float, new: tuple[int, int]) -> None:
        self.request = request
        self.at = at
        self.rank = rank
        self.prefill_s = prefill_s
        self.new_tokens, self.squares = new  # see ShadowInstance.uncached
        self.expected_s = 0.0  # from `at` to its first token, as predicted then
        self.binds = False  # its TPOT limits what else this instance may take
        self.counted = False  # the engine has counted its prompt
        self.assumed = False  # its first token was not seen: it was expected by then
        self.first_at: float | None = None
        self.produced = 0
        self.to_come = 0  # predicted output tokens that have not come yet
        self.mark: tuple[float, int, int, int, int, float] | None = None  # last progress: see ShadowInstance.progress

    def waits_until(self, step_s: float) -> tuple[float, float] | None:
        """Until when its tokens to come may wait, at this many seconds each, for its TPOT to be kept in the mean; and
        the whole time that this allows it. None where its TPOT does not bind, or before its first token."""
        if not self.binds or self.first_at is None:
            return None
        allowed_s = (max(2, self.produced + self.to_come) - 1) * self.request.targets.tpot_s
        return self.first_at + allowed_s - self.to_come * step_s, allowed_s


def count_admitted(prompts: Counter[tuple[str, str]], waiting: Iterable[Sent], counted: int) -> None:
    """Add to `prompts`, tokens by tenant and class of what an engine counted, the first of those that wait for their
    prefill, as far as `counted` is more: engines count a prompt when they admit it, before its first token is out."""
    left = counted - prompts.total()
    for sent in waiting:
        if sent.counted:
            continue
        left -= sent.request.prompt_tokens
        if left < 0:
            return
        sent.counted = True
        prompts[sent.request.tenant, sent.request.slo_class] += sent.request.prompt_tokens
