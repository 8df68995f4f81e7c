"""The states of a request and what leads from one to the next: the table that scheduler, migrator and gateway go by.

`STEPS` is the table, `after` looks a step up in it. What has no step in a state does not apply there: late news of an
attempt that is over, for instance. docs/reference/request-lifecycle.md draws it, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from controller.core.types import Request

MAX_PREFILLS = 3  # of one request, not counting those after which `PrefillAgain.counts` is False


class State(StrEnum):
    """One engine serves a request whole (SENT, ANSWERING), or two do, one after the other (PREFILLING to RELEASED).

    Each of the latter has a time-out (`MigratorConfig`) and a rollback for when it has passed or something failed.
    """

    QUEUED = "queued"  # waits for an instance
    SENT = "sent"  # one engine has all of it, and has given no token yet
    ANSWERING = "answering"  # a token is out: no second attempt
    PREFILLING = "prefilling"  # Rollback: the prefill is aborted and computed again elsewhere
    WAITING = "waiting"  # for a decode instance. Rollback: given up, its KV freed
    PLACED = "placed"  # a decode instance was chosen and told. Rollback: aborted there, another is chosen
    RESERVED = "reserved"  # it took blocks and pulls nothing yet. Rollback: the same
    MOVING = "moving"  # KV flows. Rollback: the same
    COMMITTED = "committed"  # it decodes there. Time-out: the prefill instance is told again to free its KV
    RELEASED = "released"  # the prefill instance keeps nothing of it
    ENDED = "ended"

    def __init__(self, _: str) -> None:
        self.steps: dict[str, State] = {}  # what leads where: STEPS, without a look at the hash of an enum's member


class On:
    """What leads to another state: events that drivers report, and actions that they are given."""

    SEND = "Send"
    SEND_PREFILL = "Send (prefill)"
    SEND_PAIR = "Send (pair)"  # its prefill begins when its decode stage is placed
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


UNDER_WAY = (State.PLACED, State.RESERVED, State.MOVING)  # a decode instance was chosen, and the KV is not there yet
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
    # the prefill turned out to be the whole answer
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
    """The next state; None where this does not apply."""
    return state.steps.get(on)


class OpenRequest:
    """One that has not ended. `source` was sent it or its prompt, `target` decodes it: "" where none does. `landed`:
    its KV is there, for certain. `paired`: both stages begin when the target is chosen."""

    __slots__ = ("landed", "paired", "request", "source", "state", "target")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = State.QUEUED
        self.source = ""
        self.target = ""
        self.landed = False
        self.paired = False

    def follow(self, on: str) -> bool:
        """False where this does not apply to a request in its state."""
        to = self.state.steps.get(on)
        if to is None:
            return False
        self.state = to
        return True
