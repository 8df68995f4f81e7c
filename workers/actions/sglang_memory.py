"""Stores with each action what memory of an SGLang server it released and resumed, since the server does not report it.

SGLang 0.5.23 accepts neither call twice. Resuming a tag that is not released is a KeyError in its scheduler. Releasing
one that is released fails in the memory saver ("Cannot pause allocation that is not active"). Both end the server.
`/ready` returns 503 for any paused or unhealthy server, and the memory figures of `/server_info` are those of its
start. So a call is noted before it is made and again when it was answered, and only tags noted as released are resumed.

If a worker is killed in between, it is unknown whether the call was made. The server then gets no more calls: the
action fails with `memory_unknown`, and no requests are sent there until the owner has restarted the server, which
`boot` shows. A call that timed out is different: it has reached the server, which handles calls in order, so it has
been carried out when the scheduler answers a later call.

Actions of earlier versions have no notes. One that ended with the server asleep released all of its memory. After any
other action of that time, or one begun then and continued now, the memory is `memory_unknown` too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controller.models import Action, Instance
from controller.models.fleet import Weights
from controller.services.fleet.actions import action_keep
from workers.actions.sleep_client import NotOurs

TAGS = ("kv_cache", "weights", "cuda_graph")
RELEASING, RELEASED, RESUMING = "releasing", "released", "resuming"
KEY = "memory"  # in an action's params


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one server process, which `boot` identifies. Tags missing from `tags` are resident. `sent`: the
    last call reached the server but timed out. `at`: time of the last note (epoch seconds); a look that began before it
    shows an earlier state."""

    boot: str = ""
    paused: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    sent: bool = False
    at: float = 0.0

    @property
    def of_no_process(self) -> bool:
        """Whether it comes from an action that noted no process; then the process that runs now is taken for it."""
        return not self.boot and bool(self.tags)

    @property
    def open(self) -> bool:
        """Whether a call was begun of which it is unknown whether it was made."""
        return not self.sent and any(state != RELEASED for state in self.tags.values())

    @property
    def asleep(self) -> bool:
        return all(self.tags.get(tag) == RELEASED for tag in TAGS)

    def done(self) -> Memory:
        """The memory after the call that was begun has been carried out."""
        return replace(self, tags={tag: RELEASED for tag, state in self.tags.items() if state != RESUMING}, sent=False)

    def seen(self, boot: str, asked_at: float) -> Memory:
        """The memory after a look at the server; a look that began too early changes nothing."""
        if self.of_no_process:
            return replace(self, boot=boot)
        if boot != self.boot:
            return Memory(boot)
        return self.done() if self.sent and asked_at > self.at else self


class MemoryNotes:
    """The memory of an action's server, as this action or the last one before it left it."""

    def __init__(self, action: Action) -> None:
        self._action = action
        if not _seen(action):  # copied to this action, since the earlier one may be deleted some day
            action_keep(action=action, release=False, params={**action.params, KEY: _earlier(action)})
        self.memory = Memory(**action.params[KEY])

    @property
    def woken(self) -> bool:
        """Whether this action is a wake-up that has already made a call to this process."""
        began: float = self._action.created_at.timestamp()
        return self._action.kind == Action.Kind.WAKE and self.memory.at > began

    def see(self, boot: str, asked_at: float) -> Memory:
        """Update the memory with a look at the server. Raises NotOurs."""
        adopted = self.memory.of_no_process
        self.memory = self.memory.seen(boot, asked_at)
        if adopted:  # stored at once, since another process may run at the next look
            self._keep()
        return self.memory

    def put(self, memory: Memory) -> None:
        """Store the memory. Raises NotOurs; then the call that it announces must not be made."""
        self.memory = replace(memory, at=time.time())
        self._keep()

    def _keep(self) -> None:
        params = {**self._action.params, KEY: asdict(self.memory)}
        if not action_keep(action=self._action, release=False, params=params):
            raise NotOurs


def _earlier(action: Action) -> dict[str, Any]:
    """The memory as the last action left it, or this action itself if it was begun by a version without notes."""
    if action.tries or "stage" in action.params:
        return _all(RELEASING if action.kind == Action.Kind.SLEEP else RESUMING)
    kinds = (Action.Kind.SLEEP, Action.Kind.WAKE)
    before = Action.objects.filter(instance=action.instance_id, kind__in=kinds, pk__lt=action.pk).order_by("-pk")
    for last in before.iterator(chunk_size=10):  # nearly always the first one matches
        if KEY not in last.params:
            return _untold(last, action.instance)
        if _seen(last):
            return dict(last.params[KEY])
    return {}


def _seen(action: Action) -> bool:
    """Whether the action has notes of a known process."""
    return KEY in action.params and not Memory(**action.params[KEY]).of_no_process


def _untold(last: Action, row: Instance) -> dict[str, Any]:
    """The memory that an action without notes left on a server that sleeps according to its row.

    A server that was unreachable since then may be a new process that is starting, so nothing is assumed released.
    """
    away = last.ended_at is not None and row.ready_at is not None and row.ready_at > last.ended_at
    if row.weights not in (Weights.ASLEEP, Weights.WAKING) or away:
        return {}
    slept = last.kind == Action.Kind.SLEEP and last.state == Action.State.DONE
    return _all(RELEASED if slept else RELEASING)


def _all(state: str) -> dict[str, Any]:
    return asdict(Memory(tags=dict.fromkeys(TAGS, state)))
