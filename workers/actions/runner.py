"""Advances each open action once: asks the engine, acts and records. It never waits for an engine, so a killed worker
loses nothing.

First all engines are asked in parallel, for at most ASK_S. Then the actions are advanced one after the other, for at
most BUDGET_S, and the next run continues where this one stopped. So a slow engine or a failing action does not delay
the others. Each kind of action has a module: `weight_loads`, `sleeping`, `role_switches`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import Error
from django.utils import timezone

from controller.core.messages import FleetMessage
from controller.models import Action, Decision, Instance
from controller.services.fleet.actions import action_keep, action_lease, actions_open
from workers.actions import role_switches, sleeping, weight_loads
from workers.actions.instance_keys import key_of
from workers.actions.long_calls import LongCalls
from workers.actions.parallel_calls import ThreadCalls
from workers.actions.sglang_sleep import SglangSleepClient
from workers.actions.sleep_client import ReferenceSleepClient, SleepClient
from workers.actions.weights_client import EngineAway, WeightsClient

log = logging.getLogger(__name__)

ASK_S = 1.5  # for all engines together
BUDGET_S = 3.0  # no action is begun after this; one may take some seconds more, and the task's limit is 7 s
MOST = 128  # actions of one run
ASKED = (Action.Kind.WEIGHTS_LOAD, Action.Kind.SLEEP, Action.Kind.WAKE)

TIMEOUTS = {
    Action.Kind.SLEEP: sleeping.TIMEOUT,
    Action.Kind.WAKE: sleeping.TIMEOUT,
    Action.Kind.ROLE_SWITCH: role_switches.TIMEOUT,
}

Client = Callable[[str], WeightsClient]
SleepVerbs = Callable[[str], SleepClient]


class TurnOrder:
    """The order in which actions are advanced: it begins where the last run of this process stopped."""

    def __init__(self) -> None:
        self._first = 0

    def order(self, ids: Sequence[int]) -> list[int]:
        return sorted(ids, key=lambda each: (each < self._first, each))[:MOST]

    def ended_at(self, action_id: int) -> None:
        """`action_id`: the first one that was not advanced; 0: all were."""
        self._first = action_id


CALLS, PARALLEL, TURN = LongCalls(), ThreadCalls(), TurnOrder()


class EngineClients(NamedTuple):
    """The clients that call engines; None: the usual ones, with the key of the instance."""

    weights: Client | None
    sleep: SleepVerbs | None
    calls: LongCalls


class HeardEngine:
    """An engine whose first `look` returns the answer that was received before; all other calls go to the engine."""

    def __init__(self, engine: Any, said: Future[Any] | None) -> None:
        self._engine, self._said = engine, said
        self._first = True

    def look(self) -> Any:
        if not self._first:
            return self._engine.look()
        self._first = False
        if self._said is None:
            raise EngineAway("the engine has not responded yet")
        return self._said.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def advance_actions(
    fleet: list[FleetMessage],
    client: Client | None = None,
    sleep: SleepVerbs | None = None,
    calls: LongCalls = CALLS,
) -> list[Decision]:
    """Advance every open action without a lease once; returns the decisions of those that ended."""
    ask = EngineClients(client, sleep, calls)
    utilisation = {item["id"]: item["utilisation"] for message in fleet for item in message["instances"]}
    known = actions_open()
    waiting = TURN.order(known)
    said = _ask(waiting, ask)
    began = time.monotonic()
    ended: list[Decision] = []
    for number, action_id in enumerate(waiting):
        if number and time.monotonic() - began > BUDGET_S:
            TURN.ended_at(action_id)
            log.warning("%d of %d actions wait for the next run", len(known) - number, len(known))
            return ended
        decision = _one(action_id, partial(_advance, utilisation=utilisation, ask=ask, said=said.get(action_id)))
        ended += [decision] if decision is not None else []
    TURN.ended_at(waiting[-1] + 1 if len(waiting) < len(known) else 0)
    return ended


def _ask(waiting: Sequence[int], ask: EngineClients) -> dict[int, Future[Any]]:
    """The answers of the engines, by action; engines that did not respond are missing."""
    rows = Action.objects.filter(pk__in=waiting, kind__in=ASKED).select_related("instance")
    there = [row for row in rows if row.instance.observed_state == Instance.Observed.READY and row.instance.url]
    return PARALLEL.ask({row.pk: _engine(row, ask).look for row in there}, ASK_S)


def _one(action_id: int, advance: Callable[[Action], Decision | None]) -> Decision | None:
    """Lease the action and advance it. An error is stored with the action, whose lease then expires; the other actions
    are advanced nevertheless."""
    action = None
    try:
        action = action_lease(action_id=action_id)
        return None if action is None else advance(action)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        log.exception("action %s failed to advance", action_id)
        if action is not None and not isinstance(error, Error):
            with contextlib.suppress(Error):
                action_keep(
                    action=action, release=False, error=f"unexpected error: {type(error).__name__}: {error}"[:500]
                )
    return None


def _advance(
    action: Action, *, utilisation: Mapping[str, float], ask: EngineClients, said: Future[Any] | None
) -> Decision | None:
    if action.kind == Action.Kind.FIRST_SERVED:
        return weight_loads.first_served(action)
    row, engine = action.instance, HeardEngine(_engine(action, ask), said)
    hindered = _hindered(action)
    switching = action.kind == Action.Kind.ROLE_SWITCH and role_switches.in_progress(action, ask.calls)
    if hindered is not None and not switching:  # the result of a switch in progress must be awaited
        return _give_up(action, engine, *hindered)
    if not switching and (row.observed_state != Instance.Observed.READY or not row.url):
        action_keep(action=action, error=f"its process is {row.observed_state}")
        return None
    match action.kind:
        case Action.Kind.ROLE_SWITCH:
            ended = role_switches.advance(action, ask.calls)
        case Action.Kind.WEIGHTS_LOAD:
            ended = weight_loads.advance(action, cast(WeightsClient, engine), utilisation)
        case _:
            ended = sleeping.advance(action, cast(SleepClient, engine), ask.calls)
    return ended


def _hindered(action: Action) -> tuple[str, str] | None:
    """Reason and error if the action must end now; None if it may continue."""
    wanted = action.instance.desired_state
    if wanted != Instance.Desired.RUNNING:
        return "instance_not_wanted", f"the desired state of the instance is {wanted}"
    limit = _limit(action)
    if timezone.now() - action.created_at <= limit:
        return None
    return "timeout", f"not within {limit.total_seconds():.0f} s; {action.error}"


def _limit(action: Action) -> timedelta:
    match action.kind:
        case Action.Kind.SLEEP:
            return sleeping.sleep_timeout()
        case Action.Kind.WEIGHTS_LOAD:
            return weight_loads.load_timeout(action)
    return TIMEOUTS[Action.Kind(action.kind)]


def _engine(action: Action, ask: EngineClients) -> WeightsClient | SleepClient:
    row = action.instance
    if action.kind == Action.Kind.WEIGHTS_LOAD:
        return ask.weights(row.url) if ask.weights else WeightsClient(row.url, settings.FLEET_TOKEN, key_of(row))
    if row.backend == "reference":
        return ReferenceSleepClient(row.url, settings.FLEET_TOKEN, key_of(row))
    if row.backend == "sglang":
        return SglangSleepClient(row.url, key_of(row))
    return ask.sleep(row.url) if ask.sleep else SleepClient(row.url, key_of(row))


def _give_up(action: Action, engine: HeardEngine, reason: str, error: str) -> Decision | None:
    if action.kind == Action.Kind.ROLE_SWITCH:
        return role_switches.give_up(action, reason, error)
    if action.kind == Action.Kind.WEIGHTS_LOAD:
        return weight_loads.give_up(action, reason, error, weight_loads.tried(action, cast(WeightsClient, engine)))
    return sleeping.give_up(action, reason, error, cast(SleepClient, engine))
