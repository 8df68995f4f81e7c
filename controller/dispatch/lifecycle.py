"""The states of a request and the transitions between them, used by the scheduler, the migrator and the gateway.

`STEPS` is the table and `after` looks up a transition. An event without a transition in a state is ignored there: for
example a stale event of an attempt that has ended. docs/reference/request-lifecycle.md draws the table, and a test
compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from controller.core.types import Request

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
    FIRST_TOKEN = "FirstToken"
    FINISHED = "Finished"
    CANCELLED = "Cancelled"
    FAILED = "Failed"  # before the first token
    CUT = "Failed (after a token)"
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
TWO_STAGES = (State.PREFILLING, State.WAITING, *UNDER_WAY, *LANDED)
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
    # the prefill instance produced the whole answer
    *(Transition(state, On.ANSWERED_WHOLE, State.SENT) for state in TWO_STAGES),
    # back: another decode instance, another prefill, or the queue
    *(Transition(state, On.UNDONE, State.WAITING) for state in (State.WAITING, *UNDER_WAY, State.COMMITTED)),
    *(Transition(state, On.PREFILL_AGAIN, State.QUEUED) for state in TWO_STAGES),
    *(Transition(state, On.FAILED, State.QUEUED) for state in (State.SENT, State.ANSWERING, *TWO_STAGES)),
    # the other ends
    *(Transition(State.QUEUED, on, State.ENDED) for on in (On.REFUSE, On.DROP, On.UNSCHEDULED)),
    *(Transition(state, On.GIVE_UP, State.ENDED) for state in TWO_STAGES),
    *(Transition(state, On.CUT, State.ENDED) for state in (State.SENT, State.ANSWERING, *TWO_STAGES)),
    *(Transition(state, On.CANCELLED, State.ENDED) for state in OPEN),
)

for _step in STEPS:
    _step.state.steps[_step.on] = _step.to


def after(state: State, on: str) -> State | None:
    """The next state, or None if `on` has no transition in `state`."""
    return state.steps.get(on)


class OpenRequest:
    """A request that has not ended. `source`: the instance that serves or prefills it, `target`: the one that decodes
    it, "" for none. `landed`: the target confirmed that it has the KV. `paired`: both stages begin together."""

    __slots__ = ("landed", "paired", "request", "source", "state", "target")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = State.QUEUED
        self.source = ""
        self.target = ""
        self.landed = False
        self.paired = False

    def follow(self, on: str) -> bool:
        """Take the transition. False if `on` has none in the present state."""
        to = self.state.steps.get(on)
        if to is None:
            return False
        self.state = to
        return True
