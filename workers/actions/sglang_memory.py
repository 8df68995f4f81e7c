"""What was released at an SGLang and what was resumed, kept with the orders that did it: the server does not tell.

SGLang 0.5.23 takes neither call twice. To resume a tag that is not released is a KeyError in its scheduler, to release
one that is released ends it in the memory saver ("Cannot pause allocation that is not active"); both end the server.
`/ready` is 503 of whatever is paused or unhealthy, and the memory figures of `/server_info` are those of its start. So
a call is noted before it is made and again when it was answered, and only what is noted as released is resumed.

A worker that was killed in between leaves open whether the call was made. Then nothing is told any more: the order
fails with `memory_unknown`, and nothing is sent there until its owner has started the server again, which `boot` shows.
A call that was not answered in time is no such case: it has reached the server, which takes calls in order, so it is
done when the scheduler answers what it was asked later.

Orders from before there were such notes say what they did by their end only: one that had it fall asleep released all
of it. What any other one left of a sleeper, or one that was begun then and goes on now, is `memory_unknown` too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controller.models import Action, Instance
from controller.models.fleet import Weights
from controller.services.actions import action_keep
from workers.actions.sleep_client import NotOurs

TAGS = ("kv_cache", "weights", "cuda_graph")
RELEASING, RELEASED, RESUMING = "releasing", "released", "resuming"
KEY = "memory"  # in an action's params


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one server process, `boot`. `tags` that are missing are resident. `sent`: the last call reached the server and
    was not answered in time. `at`: of the last note; a look that was begun before it shows an earlier state."""

    boot: str = ""
    paused: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    sent: bool = False
    at: float = 0.0

    @property
    def of_no_process(self) -> bool:
        """By an order that noted none: whichever process is there now was its."""
        return not self.boot and bool(self.tags)

    @property
    def open(self) -> bool:
        """A call was begun, and whether it was made is not known."""
        return not self.sent and any(state != RELEASED for state in self.tags.values())

    @property
    def asleep(self) -> bool:
        return all(self.tags.get(tag) == RELEASED for tag in TAGS)

    def done(self) -> Memory:
        """The call that was begun has been carried out."""
        return replace(self, tags={tag: RELEASED for tag, state in self.tags.items() if state != RESUMING}, sent=False)

    def seen(self, boot: str, asked_at: float) -> Memory:
        """As a look at the server shows it; one that was begun too early shows nothing."""
        if self.of_no_process:
            return replace(self, boot=boot)
        if boot != self.boot:
            return Memory(boot)
        return self.done() if self.sent and asked_at > self.at else self


class MemoryNotes:
    """The memory of an action's server, as this order or the last one before it left it."""

    def __init__(self, action: Action) -> None:
        self._action = action
        if not _seen(action):  # kept here too: the order that it comes from may be forgotten some day
            action_keep(action=action, release=False, params={**action.params, KEY: _earlier(action)})
        self.memory = Memory(**action.params[KEY])

    @property
    def woken(self) -> bool:
        """This order is to wake it, and has told this process something."""
        began: float = self._action.created_at.timestamp()
        return self._action.kind == Action.Kind.WAKE and self.memory.at > began

    def see(self, boot: str, asked_at: float) -> Memory:
        """Raises NotOurs."""
        adopted = self.memory.of_no_process
        self.memory = self.memory.seen(boot, asked_at)
        if adopted:  # at once: the process at the next look may be another one
            self._keep()
        return self.memory

    def put(self, memory: Memory) -> None:
        """Raises NotOurs: then the call that it is for must not be made."""
        self.memory = replace(memory, at=time.time())
        self._keep()

    def _keep(self) -> None:
        params = {**self._action.params, KEY: asdict(self.memory)}
        if not action_keep(action=self._action, release=False, params=params):
            raise NotOurs


def _earlier(action: Action) -> dict[str, Any]:
    """As the last order left it, or this one itself, if it was told something before there were notes."""
    if action.tries or "stage" in action.params:
        return _all(RELEASING if action.kind == Action.Kind.SLEEP else RESUMING)
    kinds = (Action.Kind.SLEEP, Action.Kind.WAKE)
    before = Action.objects.filter(instance=action.instance_id, kind__in=kinds, pk__lt=action.pk).order_by("-pk")
    for last in before.iterator(chunk_size=10):  # nearly always it is the first
        if KEY not in last.params:
            return _untold(last, action.instance)
        if _seen(last):
            return dict(last.params[KEY])
    return {}


def _seen(action: Action) -> bool:
    """It has notes, and not of whichever process it will find."""
    return KEY in action.params and not Memory(**action.params[KEY]).of_no_process


def _untold(last: Action, row: Instance) -> dict[str, Any]:
    """What an order without notes left of a server that is asleep by its row.

    One that was away since may be another process, and starting: nothing is taken for released there.
    """
    away = last.ended_at is not None and row.ready_at is not None and row.ready_at > last.ended_at
    if row.weights not in (Weights.ASLEEP, Weights.WAKING) or away:
        return {}
    slept = last.kind == Action.Kind.SLEEP and last.state == Action.State.DONE
    return _all(RELEASED if slept else RELEASING)


def _all(state: str) -> dict[str, Any]:
    return asdict(Memory(tags=dict.fromkeys(TAGS, state)))
