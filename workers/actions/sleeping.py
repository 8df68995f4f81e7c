"""One look at an instance that shall fall asleep or wake up: ask the engine, tell it the next thing, record.

Falling asleep: gateways stop sending (the row says so), what runs ends, then the engine is told. Waking from level 1 is
one verb. From level 2 it is four, since the weights are gone: wake the weights' memory, read them again, drop what the
prefix cache claims to hold, wake the KV cache's memory; only then is the instance told of to gateways. Each may be said
twice, and the one that comes next is stored, so a killed worker's successor goes on there. Of an engine that may not be
told twice its client keeps with the order what it was told (`workers.actions.sglang_memory`).
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
from controller.services.actions import action_end, action_keep
from workers.actions.long_calls import LongCalls, call_mark, goes_on_elsewhere
from workers.actions.sleep_client import NoSleepMode, NotOurs, SleepClient, SleepState
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.live import LiveUnavailable, read_fleet

MOST_TRIES = 3
ANSWER_S = 3.0  # after that an engine that is neither moving nor where it should be is told again
LOOK_S = 2.0
STARTS_S = 300.0  # from the order to wake it; a server that is not ready by itself may be starting for so long
TIMEOUT = timedelta(minutes=20)
AFTER_DRAIN = timedelta(minutes=5)  # that an order to sleep lasts beyond the time that running requests have to end
SOURCES = {1: "host", 2: "disk"}  # where a vLLM's weights come back from


@dataclass(frozen=True, slots=True)
class SleepFailed:
    """It cannot be brought about."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Done:
    outcome: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Next:
    """One step went well: the next one may follow at once."""


Look = SleepFailed | Done | Next | None


def look_at(action: Action, engine: SleepClient, calls: LongCalls) -> Decision | None:
    """The Decision if this look ended it. Steps that take no time follow each other within LOOK_S."""
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


def _step(action: Action, engine: SleepClient, calls: LongCalls) -> Look:
    try:
        return _sleep(action, engine) if action.kind == Action.Kind.SLEEP else _wake(action, engine, calls)
    except NotOurs:
        return None
    except EngineAway as error:
        return _later(action, str(error))
    except EngineRefuses as error:
        if error.busy:  # with a load of weights, say: it is asked again
            return _later(action, str(error))
        return SleepFailed("no_sleep_mode" if isinstance(error, NoSleepMode) else "engine_refused", str(error))


def give_up(action: Action, reason: str, error: str, engine: SleepClient) -> Decision | None:
    """It cannot be brought about, or has become pointless. Where an order to sleep left the engine it says itself."""
    engine.bind(action)
    left_at = _left_at(action, engine) if action.kind == Action.Kind.SLEEP else 0
    return _end(action, SleepFailed(reason, error), left_at)


def _left_at(action: Action, engine: SleepClient) -> int:
    """The level at which it sleeps; 0: it is awake. Where it cannot be asked it sleeps if it was ever told to: to wake
    what is awake does no harm, to send requests to a sleeper does."""
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


def _sleep(action: Action, engine: SleepClient) -> Look:
    said, level = _look(engine), int(action.params["level"])
    asleep = not said.awake and said.level > 0  # without a level it is merely paused
    hindered = _hindered(said, level)
    if hindered is not None:
        return hindered
    if not action.params.get("able"):  # before its traffic is let go, and before its word is taken for it
        engine.check_able(level)
        able = {**action.params, "able": True}
        return Next() if action_keep(action=action, release=False, params=able, error="") else None
    if asleep:
        aborted = action.params.get("aborted", 0)
        return Done({"level": level, "asleep_s": round(_age(action), 3), "aborted": aborted})
    settled = action.tries or _age(action) >= SETTLE_S  # before that a gateway may not know yet, and send
    if said.moving or not settled:
        return _later(action)
    if not action.tries:
        if not _drains(action, said):
            # Anew: an answer that came late may be older than what was sent there last.
            said = _look(engine)
        changed = said.unknown or said.not_ready or (said.level and not said.awake)
        if said.moving or _drains(action, said) or changed:
            return _later(action, f"{said.requests} requests run there" if said.requests else "")
    return _tell(action, lambda: engine.sleep(level), "stays_awake", aborted=said.requests)


def _hindered(said: SleepState, level: int) -> SleepFailed | None:
    if said.unknown:
        return SleepFailed("memory_unknown", said.unknown)
    if said.not_ready:
        return SleepFailed("not_ready", said.not_ready)
    if not said.awake and said.level not in (0, level):
        return SleepFailed("asleep_otherwise", f"it sleeps at level {said.level} already, level {level} was asked for")
    return None


def _drains(action: Action, said: SleepState) -> bool:
    """What runs there may still finish, and KV that it keeps may still be pulled: a sleeper keeps none."""
    if _age(action) >= settings.DRAIN_TIMEOUT_S:  # counted from the order; then it is aborted
        return False
    return said.requests > 0 or _kept_kv(action.instance_id) > 0


def _kept_kv(instance_id: str) -> int:
    """Prompts whose KV it keeps, as gateways publish; 0 if Redis is away."""
    try:
        fleet = fresh(read_fleet(), time.time())
    except LiveUnavailable:
        return 0
    return sum(item.get("kept_kv", 0) for each in fleet for item in each["instances"] if item["id"] == instance_id)


def sleep_timeout() -> timedelta:
    """Of an order to sleep."""
    return max(TIMEOUT, timedelta(seconds=settings.DRAIN_TIMEOUT_S) + AFTER_DRAIN)


# ---- waking up ------------------------------------------------------------------------------------------------------


def _wake(action: Action, engine: SleepClient, calls: LongCalls) -> Look:
    said = _look(engine)
    if said.unknown and not said.awake:
        return SleepFailed("memory_unknown", said.unknown)
    if said.moving:
        return _later(action)
    if said.not_ready:  # nothing there is asleep: it gets ready without us, or is paused by its owner, or unhealthy
        waits = _age(action) < STARTS_S
        return _later(action, said.not_ready) if waits else SleepFailed("not_ready", said.not_ready)
    if said.awake:
        engine.whole()
    if not said.awake and said.level > int(action.params["level"]):  # somebody put it to a deeper sleep since
        deeper = {**action.params, "level": said.level}
        return Next() if action_keep(action=action, release=False, params=deeper) else None
    if int(action.params["level"]) == 2:
        return _wake_empty(action, engine, calls, said.awake)
    return _awake(action) if said.awake else _tell(action, engine.wake, "stays_asleep")


def _wake_empty(action: Action, engine: SleepClient, calls: LongCalls, awake: bool) -> Look:
    """From level 2. That it is awake says nothing of its weights: they are read again in any case."""
    match action.params.get("stage", "weights"):
        case "weights":
            engine.wake("weights")
            return _to(action, "reload")
        case "reload":
            return _reload(action, engine, calls)
        case "cache":
            if not engine.reset_prefix_cache():
                return _later(action, "the prefix cache is still held")
            engine.wake("kv_cache")
            return _to(action, "awake")
    return _awake(action) if awake else _tell(action, lambda: engine.wake("kv_cache"), "stays_asleep")


def _reload(action: Action, engine: SleepClient, calls: LongCalls) -> Look:
    """In a thread of one worker; others see by its mark that it still waits."""
    call = calls.find(action.pk)
    if call is None:
        if goes_on_elsewhere(action.params.get("reload")):
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
    # Of level 1 no call is waited for: from the first telling to the look that saw it, a second late at most.
    loaded = action.params.get("load_s", round(_since(action), 3) if action.tries else None)
    return Done(outcome | ({} if loaded is None else {"load_s": loaded}))


# ---- the row --------------------------------------------------------------------------------------------------------


def _later(action: Action, error: str = "", **fields: Any) -> Look:
    """It is looked at again."""
    action_keep(action=action, error=error, **fields)
    return None


def _tell(action: Action, call: Callable[[], None], failed: str, **params: Any) -> Look:
    """Stored before the engine is told; told again when nothing came of it. None: the action is somebody else's.

    One that is busy (it sends its weights, say) has done nothing and says why: that is no try, and its words stay until
    it is told again or the order's time is over, whose Decision then carries them.
    """
    if _since(action) < ANSWER_S:
        return _later(action, action.error)
    if action.tries >= MOST_TRIES:
        return SleepFailed(failed, f"told {action.tries} times, without effect")
    told, before = {**action.params, **params, "told_at": time.time()}, action.tries
    state = Action.State.RUNNING
    if not action_keep(action=action, release=False, params=told, tries=before + 1, state=state, error=""):
        return None
    try:
        call()
    except EngineRefuses as error:
        if not error.busy:
            raise
        return _later(action, str(error), tries=before)  # not its params: a client has kept there what it did
    return Next()


def _to(action: Action, stage: str, **params: Any) -> Next | None:
    """None: the action is somebody else's by now."""
    told = {**action.params, **params, "stage": stage, "told_at": time.time()}
    kept = action_keep(action=action, release=False, params=told, state=Action.State.RUNNING, error="")
    return Next() if kept else None


def _mark(action: Action) -> bool:
    return action_keep(action=action, release=False, params={**action.params, "reload": call_mark()})


def _age(action: Action) -> float:
    return (timezone.now() - action.created_at).total_seconds()


def _since(action: Action) -> float:
    """Seconds since the engine was last told."""
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
