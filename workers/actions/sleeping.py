"""Advances a sleep or a wake-up of an instance: asks the engine for its state, makes the next call, records it.

Sleep: gateways stop sending requests, as the row says; requests in flight end; then the engine is called. Waking from
level 1 is one call. From level 2 it is four calls, since the weights are gone: wake the memory of the weights, read
them again, reset the prefix cache, wake the memory of the KV cache. Only then may gateways send requests. Each call is
idempotent, and the next one is stored, so that another worker continues there if this one is killed. For an engine
whose calls are not idempotent, its client stores with the action which calls were made
(`workers.actions.sglang_memory`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from controller.models import Action, Decision
from controller.scale.lifecycle import SETTLE_S
from controller.scale.observation import fresh
from controller.services.fleet.actions import action_end, action_keep
from controller.services.fleet.sleeping import NO_SLEEP_MODE
from workers.actions.long_calls import LongCalls, call_mark, in_progress_elsewhere
from workers.actions.sleep_client import NoSleepMode, NotOurs, SleepClient, SleepState
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.live import LiveUnavailable, read_fleet

MOST_TRIES = 3
ANSWER_S = 3.0  # after that, an engine that is neither moving nor in the desired state is called again
LOOK_S = 2.0
STARTS_S = 300.0  # after the order to wake; a server that is not ready may be starting for this long
TIMEOUT = timedelta(minutes=20)
AFTER_DRAIN = timedelta(minutes=5)  # that an order to sleep lasts beyond the time that running requests have to end
SOURCES = {1: "host", 2: "disk"}  # where a vLLM server loads its weights from when it wakes


@dataclass(frozen=True, slots=True)
class SleepFailed:
    """The sleep or wake-up has failed."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Done:
    """The sleep or wake-up has succeeded."""

    outcome: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Next:
    """One step has succeeded; the next one may follow at once."""


StepResult = SleepFailed | Done | Next | None  # None: continue at the next run


def advance(action: Action, engine: SleepClient, calls: LongCalls) -> Decision | None:
    """Advance the action, step after step for at most LOOK_S; returns its Decision if it ended."""
    engine.bind(action)
    began, seen = time.monotonic(), _step(action, engine, calls)
    while isinstance(seen, Next) and time.monotonic() - began < LOOK_S:
        seen = _step(action, engine, calls)
    if isinstance(seen, SleepFailed):
        return give_up(action, seen.reason, seen.error, engine)
    if isinstance(seen, Done):
        return _end(action, seen)
    if isinstance(seen, Next):
        _later(action)
    return None


def _step(action: Action, engine: SleepClient, calls: LongCalls) -> StepResult:
    try:
        return _sleep(action, engine) if action.kind == Action.Kind.SLEEP else _wake(action, engine, calls)
    except NotOurs:
        return None
    except EngineAway as error:
        return _later(action, str(error))
    except EngineRefuses as error:
        if error.busy:  # for example with a weight load; retried
            return _later(action, str(error))
        return SleepFailed(NO_SLEEP_MODE if isinstance(error, NoSleepMode) else "engine_refused", str(error))


def give_up(action: Action, reason: str, error: str, engine: SleepClient) -> Decision | None:
    """End an action that failed or is no longer needed. After a sleep the engine is asked for its state."""
    engine.bind(action)
    left_at = _left_at(action, engine) if action.kind == Action.Kind.SLEEP else 0
    return _end(action, SleepFailed(reason, error), left_at)


def _left_at(action: Action, engine: SleepClient) -> int:
    """The level at which the engine sleeps; 0: it is awake. An engine that does not respond counts as asleep if it was
    ever told to sleep: waking an engine that is awake does no harm, but sending requests to a sleeping one does."""
    level = int(action.params["level"])
    try:
        said = _look(engine)
        if not said.awake and engine.unpause():
            said = _look(engine)
    except (EngineAway, EngineRefuses):
        return level if action.tries else 0
    except NotOurs:
        return 0
    return 0 if said.awake or said.not_ready else said.level or level


def _look(engine: SleepClient) -> SleepState:
    return engine.recall(engine.look())


# ---- falling asleep -------------------------------------------------------------------------------------------------


def _sleep(action: Action, engine: SleepClient) -> StepResult:
    said, level = _look(engine), int(action.params["level"])
    asleep = not said.awake and said.level > 0  # without a level it is only paused
    hindered = _hindered(said, level)
    if hindered is not None:
        return hindered
    if not action.params.get("able"):  # checked before its requests are aborted and before its report is trusted
        engine.check_able(level)
        able = {**action.params, "able": True}
        return Next() if action_keep(action=action, release=False, params=able, error="") else None
    if asleep:
        aborted = action.params.get("aborted", 0)
        return Done({"level": level, "asleep_s": round(_age(action), 3), "aborted": aborted})
    # Before SETTLE_S has passed, a gateway may not know of the order and still send requests.
    settled = action.tries or _age(action) >= SETTLE_S
    if said.moving or not settled:
        return _later(action)
    if not action.tries:
        if not _drains(action, said):
            # Looked at again, since a late answer may be older than the last request sent there.
            said = _look(engine)
        changed = said.unknown or said.not_ready or (said.level and not said.awake)
        if said.moving or _drains(action, said) or changed:
            return _later(action, f"{said.requests} requests are still running" if said.requests else "")
    return _call(action, lambda: engine.sleep(level), "stays_awake", aborted=said.requests)


def _hindered(said: SleepState, level: int) -> SleepFailed | None:
    if said.unknown:
        return SleepFailed("memory_unknown", said.unknown)
    if said.not_ready:
        return SleepFailed("not_ready", said.not_ready)
    if not said.awake and said.level not in (0, level):
        return SleepFailed("asleep_otherwise", f"the engine already sleeps at level {said.level}, not at level {level}")
    return None


def _drains(action: Action, said: SleepState) -> bool:
    """Whether requests in flight may still finish, and kept KV may still be pulled: a sleeping engine keeps none."""
    if _age(action) >= settings.DRAIN_TIMEOUT_S:  # counted from the order; then they are aborted
        return False
    return said.requests > 0 or _kept_kv(action.instance_id) > 0


def _kept_kv(instance_id: str) -> int:
    """Prompts whose KV the instance keeps, as gateways publish; 0 if Redis is unavailable."""
    try:
        fleet = fresh(read_fleet(), time.time())
    except LiveUnavailable:
        return 0
    return sum(item.get("kept_kv", 0) for each in fleet for item in each["instances"] if item["id"] == instance_id)


def sleep_timeout() -> timedelta:
    """The longest that an order to sleep may take."""
    return max(TIMEOUT, timedelta(seconds=settings.DRAIN_TIMEOUT_S) + AFTER_DRAIN)


# ---- waking up ------------------------------------------------------------------------------------------------------


def _wake(action: Action, engine: SleepClient, calls: LongCalls) -> StepResult:
    said = _look(engine)
    if said.unknown and not said.awake:
        return SleepFailed("memory_unknown", said.unknown)
    if said.moving:
        return _later(action)
    if said.not_ready:  # it does not sleep: it is starting, paused by its owner, or unhealthy
        waits = _age(action) < STARTS_S
        return _later(action, said.not_ready) if waits else SleepFailed("not_ready", said.not_ready)
    if said.awake:
        engine.whole()
    if not said.awake and said.level > int(action.params["level"]):  # its owner put it into a deeper sleep since
        deeper = {**action.params, "level": said.level}
        return Next() if action_keep(action=action, release=False, params=deeper) else None
    if int(action.params["level"]) == 2:
        return _wake_empty(action, engine, calls, said.awake)
    return _awake(action) if said.awake else _call(action, engine.wake, "stays_asleep")


def _wake_empty(action: Action, engine: SleepClient, calls: LongCalls, awake: bool) -> StepResult:
    """Wake from level 2. The weights are read again in any case, since an awake engine may have none."""
    match action.params.get("stage", "weights"):
        case "weights":
            engine.wake("weights")
            return _to(action, "reload")
        case "reload":
            return _reload(action, engine, calls)
        case "cache":
            if not engine.reset_prefix_cache():
                return _later(action, "the prefix cache is still in use")
            engine.wake("kv_cache")
            return _to(action, "awake")
    return _awake(action) if awake else _call(action, lambda: engine.wake("kv_cache"), "stays_asleep")


def _reload(action: Action, engine: SleepClient, calls: LongCalls) -> StepResult:
    """Read the weights again, in a thread of one worker; its mark shows other workers that the call is in progress."""
    call = calls.find(action.pk)
    if call is None:
        if in_progress_elsewhere(action.params.get("reload")):
            return _later(action)
        if not _mark(action):
            return None
        call = calls.begin(action.pk, engine.reload)
    elif not call.done:
        _mark(action)
    if not call.done:
        return _later(action)
    calls.forget(action.pk)
    if isinstance(call.error, EngineAway):
        return SleepFailed("reload_lost", str(call.error))
    if call.error is not None:
        return SleepFailed("reload_failed", str(call.error))
    return _to(action, "cache", load_s=round(call.seconds, 3))


def _awake(action: Action) -> Done:
    level = int(action.params["level"])
    outcome = {"level": level, "source": SOURCES[level], "awake_s": round(_age(action), 3)}
    # At level 1 nothing waits for the call, so this is the time from the first call to the run that saw the result.
    loaded = action.params.get("load_s", round(_since(action), 3) if action.tries else None)
    return Done(outcome | ({} if loaded is None else {"load_s": loaded}))


# ---- the row --------------------------------------------------------------------------------------------------------


def _later(action: Action, error: str = "", **fields: Any) -> StepResult:
    """Store the progress; the next run continues."""
    action_keep(action=action, error=error, **fields)
    return None


def _call(action: Action, call: Callable[[], None], failed: str, **params: Any) -> StepResult:
    """Make a call to the engine. It is stored first, and repeated after ANSWER_S without effect, up to MOST_TRIES
    times. None: another worker holds the action now.

    A busy engine (one that sends its weights, for example) has done nothing, so that does not count as a try. Its error
    stays on the action until the next call, or until the action times out, whose Decision then contains it.
    """
    if _since(action) < ANSWER_S:
        return _later(action, action.error)
    if action.tries >= MOST_TRIES:
        return SleepFailed(failed, f"called {action.tries} times, without effect")
    told, before = {**action.params, **params, "told_at": time.time()}, action.tries
    state = Action.State.RUNNING
    if not action_keep(action=action, release=False, params=told, tries=before + 1, state=state, error=""):
        return None
    try:
        call()
    except EngineRefuses as error:
        if not error.busy:
            raise
        return _later(action, str(error), tries=before)  # the params stay, since the client stores its notes there
    return Next()


def _to(action: Action, stage: str, **params: Any) -> Next | None:
    """Store the next stage of a wake-up from level 2. None: another worker holds the action now."""
    told = {**action.params, **params, "stage": stage, "told_at": time.time()}
    kept = action_keep(action=action, release=False, params=told, state=Action.State.RUNNING, error="")
    return Next() if kept else None


def _mark(action: Action) -> bool:
    return action_keep(action=action, release=False, params={**action.params, "reload": call_mark()})


def _age(action: Action) -> float:
    return (timezone.now() - action.created_at).total_seconds()


def _since(action: Action) -> float:
    """Seconds since the last call to the engine."""
    return max(0.0, time.time() - float(action.params.get("told_at", 0.0)))


def _end(action: Action, seen: SleepFailed | Done, left_at: int = 0) -> Decision | None:
    failed = isinstance(seen, SleepFailed)
    sleep = action.kind == Action.Kind.SLEEP
    kind = {(True, False): "instance_asleep", (True, True): "instance_sleep_failed"}.get(
        (sleep, failed), "instance_wake_failed" if failed else "instance_awake"
    )
    params = action.params
    inputs: dict[str, Any] = {"level": params["level"], "tries": action.tries, "action": action.pk}
    inputs |= {name: params[name].get("decision") for name in ("scale_out", "scale_in") if name in params}
    level = f"level_{params['level']}"
    return action_end(
        action=action,
        state=Action.State.FAILED if failed else Action.State.DONE,
        kind=kind,
        subject=("instance", action.instance_id),
        reason=seen.reason if isinstance(seen, SleepFailed) else level,
        inputs=inputs,
        outcome=_failure(seen, left_at) if isinstance(seen, SleepFailed) else seen.outcome,
        error=seen.error if isinstance(seen, SleepFailed) else "",
        left_at=left_at,
    )


def _failure(seen: SleepFailed, left_at: int) -> dict[str, Any]:
    return {"error": seen.error} | ({"sleeps_at": left_at} if left_at else {})
