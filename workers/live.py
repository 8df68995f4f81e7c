"""The one sender to browsers, and the one reader and writer of live state in Redis.

Redis holds only what can be rebuilt and may be away or hang at any time: every call here ends within `CALL_S` and
raises LiveUnavailable. Plain names are for synchronous callers (tasks, pages, the control API), names starting with `a`
are for the event loop. `LiveState` is the gateway's own, one object a process.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import lru_cache
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from controller.core.errors import SlacklineError
from controller.core.messages import (
    COMMAND_ANSWER_KEY,
    COMMAND_CHANNEL,
    CONFIG_CHANNEL,
    FLEET_KEY,
    GATEWAYS_KEY,
    HEARTBEAT_KEY,
    LEASE_KEY,
    LIVE_DECISIONS,
    LIVE_EXPERIMENTS,
    LIVE_QUEUE,
    LIVE_TYPE,
    QUEUE_ASKED_KEY,
    QUEUE_KEY,
    TELEMETRY_KEY,
    WATCHED_KEY,
    CommandAnswer,
    CommandMessage,
    ExperimentMessage,
    FleetMessage,
    LiveMessage,
    QueueState,
)
from controller.wording.sentences import StoredDecision, message_of
from workers.shared_clock import SharedClock

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 1.0
WATCHED_S = 10
LEAST_AHEAD_S = 0.05  # a smaller difference of two clocks changes no decision
QUEUE_KEPT_S = 10
ANSWER_KEPT_S = 30
_AWAY = (RedisError, OSError, TimeoutError)
_TIMEOUTS: dict[str, float] = {"socket_timeout": CALL_S, "socket_connect_timeout": CALL_S}

# The lease is renewed only by its holder: get and set must not be torn apart.
_RENEW = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return 1 end
if holder then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class LiveUnavailable(SlacklineError, ConnectionError):
    """Redis is away or hangs. Also a ConnectionError, which callers that bound any I/O expect."""


def _settings() -> Any:
    from django.conf import settings

    return settings


def _messages(values: Iterable[bytes | str | None]) -> list[Any]:
    return [orjson.loads(value) for value in values if value is not None]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _seconds(told: tuple[int, int]) -> float:
    """Of an answer to TIME."""
    return told[0] + told[1] / 1e6


def _live(topic: str, seq: int, data: Any) -> dict[str, Any]:
    message = LiveMessage(topic=topic, seq=seq, at=time.time(), data=data)
    return {"type": LIVE_TYPE, "message": message}


class Answers(list[CommandAnswer]):
    """One of each gateway that answered a command. `silent`: how many heard it and said nothing in time."""

    silent = 0


class AnswersLost(LiveUnavailable):
    """Redis went away while a command was told or answered: gateways may have applied it. `answers`: what had come."""

    def __init__(self, message: str, answers: Answers) -> None:
        super().__init__(message)
        self.answers = answers


class LiveState:
    """Async half. `gateway` is this process's id; "" for one that only reads. What it reads is stamped on `clock`."""

    def __init__(self, url: str, gateway: str = "") -> None:
        self.gateway = gateway
        self.clock = SharedClock()
        self._redis = AsyncRedis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **_TIMEOUTS)  # type: ignore[arg-type]
        self._listener = AsyncRedis.from_url(url, socket_connect_timeout=CALL_S, socket_timeout=None)
        self._renew = self._redis.register_script(_RENEW)
        self._seq = count(1)

    async def _call(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(CALL_S):
                return await work
        except _AWAY as error:
            raise LiveUnavailable(f"Redis is away: {error}") from error

    async def server_time(self) -> float:
        """Redis' own clock, epoch seconds."""
        return _seconds(await self._call(self._redis.time()))

    # ---- telemetry ------------------------------------------------------------------------------------------------

    async def lease(self, what: str, ttl_s: float) -> bool:
        """True while this gateway holds it; renewed by calling again before it ends."""
        keys, ttl_ms = [LEASE_KEY.format(what=what)], int(ttl_s * 1000)
        return bool(await self._call(self._renew(keys=keys, args=[self.gateway, ttl_ms])))

    async def publish_telemetry(self, loads: dict[str, dict[str, Any]], ttl_s: float) -> None:
        """`loads` by instance id, `observed_at` on the shared clock."""
        pipe = self._redis.pipeline(transaction=False)
        for instance, load in loads.items():
            message = {"instance": instance, "at": load["observed_at"], "load": load}
            pipe.set(TELEMETRY_KEY.format(instance=instance), orjson.dumps(message), px=int(ttl_s * 1000))
        await self._call(pipe.execute())

    async def read_telemetry(self, instance_ids: list[str]) -> dict[str, dict[str, Any]]:
        if not instance_ids:
            return {}
        values = await self._call(self._redis.mget([TELEMETRY_KEY.format(instance=i) for i in instance_ids]))
        return {message["instance"]: message["load"] for message in _messages(values)}

    # ---- state of a gateway ---------------------------------------------------------------------------------------

    async def watched(self, topics: Iterable[str]) -> set[str]:
        names = list(topics)
        values = await self._call(self._redis.mget([WATCHED_KEY.format(topic=name) for name in names]))
        return {name for name, value in zip(names, values, strict=True) if value is not None}

    async def amark_watched(self, topic: str) -> None:
        await self._call(self._redis.set(WATCHED_KEY.format(topic=topic), b"1", ex=WATCHED_S))

    async def publish_fleet(self, message: FleetMessage, ttl_s: float) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.sadd(GATEWAYS_KEY, self.gateway)
        pipe.set(FLEET_KEY.format(gateway=self.gateway), orjson.dumps(message), px=int(ttl_s * 1000))
        await self._call(pipe.execute())

    async def publish_queue(self, state: QueueState) -> None:
        key = QUEUE_KEY.format(gateway=self.gateway)
        await self._call(self._redis.set(key, orjson.dumps(state), ex=QUEUE_KEPT_S))

    async def queue_asked(self) -> int:
        """How often somebody has asked for whole queues."""
        return int(await self._call(self._redis.get(QUEUE_ASKED_KEY)) or 0)

    async def aask_queue(self) -> int:
        return int(await self._call(self._redis.incr(QUEUE_ASKED_KEY)))

    async def leave(self) -> None:
        """At shutdown: pages need not wait for the state to expire."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.srem(GATEWAYS_KEY, self.gateway)
        pipe.delete(FLEET_KEY.format(gateway=self.gateway), QUEUE_KEY.format(gateway=self.gateway))
        await self._call(pipe.execute())

    async def aread_fleet(self) -> list[FleetMessage]:
        return await self._read_all(FLEET_KEY)

    async def aread_queue(self) -> list[QueueState]:
        return await self._read_all(QUEUE_KEY)

    async def _read_all(self, key: str) -> list[Any]:
        gateways = sorted(await self._call(self._redis.smembers(GATEWAYS_KEY)))
        if not gateways:
            return []
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        pipe.mget([key.format(gateway=_text(g)) for g in gateways])
        sent = time.monotonic()
        told, values = await self._call(pipe.execute())
        self.clock.heard(_seconds(told), sent, time.monotonic())
        return _messages(values)

    # ---- browsers -------------------------------------------------------------------------------------------------

    async def send(self, topic: str, data: Any) -> None:
        """To every browser on this topic. Delivered at most once; `seq` shows gaps."""
        from channels.layers import get_channel_layer

        await self._call(get_channel_layer().group_send(topic, _live(topic, next(self._seq), data)))

    # ---- commands and notices -------------------------------------------------------------------------------------

    async def listen(self) -> AsyncIterator[CommandMessage | int]:
        """Commands to this gateway, and config versions (int). Raises LiveUnavailable when the connection is lost."""
        mine = COMMAND_CHANNEL.format(gateway=self.gateway)
        pubsub = self._listener.pubsub(ignore_subscribe_messages=True)
        try:
            await self._call(pubsub.subscribe(mine, CONFIG_CHANNEL))
            while True:
                message = await pubsub.get_message(timeout=5.0)
                if message is None:
                    await self._call(pubsub.ping())
                elif message["type"] == "message":
                    data = orjson.loads(message["data"])
                    yield data if message["channel"] == mine.encode() else int(data)
        except (*_AWAY, orjson.JSONDecodeError) as error:
            raise LiveUnavailable(f"Redis is away: {error}") from error
        finally:
            await pubsub.aclose()

    async def answer(self, answer: CommandAnswer) -> None:
        key = COMMAND_ANSWER_KEY.format(command=answer["command"])
        pipe = self._redis.pipeline(transaction=False)
        pipe.rpush(key, orjson.dumps(answer))
        pipe.expire(key, ANSWER_KEPT_S)
        await self._call(pipe.execute())

    async def close(self) -> None:
        for client in (self._redis, self._listener):
            await client.aclose()


async def follow(
    state: LiveState, on_command: Callable[[CommandMessage], None], on_config: Callable[[int], None]
) -> None:
    """Hear commands and notices for ever, through outages."""
    pause_s = 0.5
    while True:
        try:
            async with aclosing(state.listen()) as heard:  # type: ignore[type-var]
                async for message in heard:
                    pause_s = 0.5
                    if isinstance(message, int):
                        on_config(message)
                    else:
                        on_command(message)
        except LiveUnavailable:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)


# ---- for consumers: one state a loop --------------------------------------------------------------------------------

_states: WeakKeyDictionary[asyncio.AbstractEventLoop, LiveState] = WeakKeyDictionary()


def _state() -> LiveState:
    loop = asyncio.get_running_loop()
    state = _states.get(loop)
    if state is None:
        state = _states[loop] = LiveState(_settings().REDIS_URL)
    return state


def ahead_s() -> float:
    """Seconds to add to this host's clock for that of published states, as `aread_fleet` last saw it; 0 without one."""
    try:
        ahead = _state().clock.ahead_of_wall()
    except RuntimeError:  # no loop runs, so nothing was read
        return 0.0
    return ahead if abs(ahead) >= LEAST_AHEAD_S else 0.0


def shared_now() -> float:
    return time.time() + ahead_s()


async def aread_fleet() -> list[FleetMessage]:
    """The newest state of each gateway heard of lately, `at` on the shared clock."""
    return await _state().aread_fleet()


async def aread_queue() -> list[QueueState]:
    """Whole queues, as of the last time that somebody asked for them."""
    return await _state().aread_queue()


async def aask_queue() -> int:
    """Asks each gateway for its whole queue, which comes with its next tick; see `ask_queue`."""
    return await _state().aask_queue()


async def amark_watched(topic: str) -> None:
    """A browser watches: gateways publish this topic for ten more seconds."""
    await _state().amark_watched(topic)


# ---- for tasks, pages and the control API: synchronous --------------------------------------------------------------


@lru_cache(maxsize=4)
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_TIMEOUTS)


def _run(work: Callable[[redis.Redis], T]) -> T:
    try:
        return work(_client(_settings().REDIS_URL))
    except _AWAY as error:
        raise LiveUnavailable(f"Redis is away: {error}") from error


def _gateways(client: redis.Redis) -> list[str]:
    return sorted(_text(member) for member in client.smembers(GATEWAYS_KEY))


def read_fleet() -> list[FleetMessage]:
    """The newest state of each gateway heard of lately, `at` on this host's clock; check it before acting on it."""
    return _run(lambda client: _read(client, FLEET_KEY))


def read_queue() -> list[QueueState]:
    """Whole queues, as of the last time that somebody asked for them."""
    return _run(lambda client: _read(client, QUEUE_KEY))


def ask_queue() -> int:
    """Asks each gateway for its whole queue: it comes, with this number in `asked`, within half a second or so."""

    def ask(client: redis.Redis) -> int:
        client.set(WATCHED_KEY.format(topic=LIVE_QUEUE), b"1", ex=WATCHED_S)
        return int(client.incr(QUEUE_ASKED_KEY))

    return _run(ask)


def _read(client: redis.Redis, key: str) -> list[Any]:
    gateways = _gateways(client)
    if not gateways:
        return []
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.mget([key.format(gateway=name) for name in gateways])
    clock, sent = SharedClock(), time.monotonic()
    told, values = pipe.execute()
    clock.heard(_seconds(told), sent, time.monotonic())
    ahead, messages = clock.ahead_of_wall(), _messages(values)
    if abs(ahead) >= LEAST_AHEAD_S:
        for message in messages:
            message["at"] -= ahead
    return messages


def read_heartbeats(processes: Sequence[str]) -> dict[str, float]:
    """When each process (worker, beat) last acted, epoch seconds; one that is not heard of is missing."""
    keys = [HEARTBEAT_KEY.format(process=name) for name in processes]
    values = _run(lambda client: client.mget(keys))
    return {name: float(value) for name, value in zip(processes, values, strict=True) if value is not None}


def notify_config(version: int) -> None:
    """Makes gateways look at the configuration at once. They find out by themselves within half a second."""
    _run(lambda client: client.publish(CONFIG_CHANNEL, str(version)))


def announce(decision: StoredDecision | None) -> None:
    """Log a decision and send it to the browsers that watch. Call it after the transaction has committed.

    Never raises: the row is what counts, and a browser that hears nothing reads it at its next look.
    """
    if decision is None:
        return
    message = message_of(decision)
    log.info("decision %s (%s, %s): %s", decision.pk, decision.kind, decision.reason, message["sentence"])
    try:
        to_group(LIVE_DECISIONS, _live(LIVE_DECISIONS, 0, message))
    except LiveUnavailable as error:
        log.warning("decision %s was not sent live: %s", decision.pk, error)


def send_experiment(message: ExperimentMessage) -> None:
    """To the browsers that watch experiments."""
    to_group(LIVE_EXPERIMENTS, _live(LIVE_EXPERIMENTS, 0, message))


def to_group(group: str, event: dict[str, Any]) -> None:
    """To the sockets of a group of the channel layer; `type` names their method."""
    from asgiref.sync import async_to_sync
    from channels.layers import get_channel_layer

    async def deliver() -> None:
        async with asyncio.timeout(CALL_S):
            await get_channel_layer().group_send(group, event)

    try:
        async_to_sync(deliver)()
    except _AWAY as error:
        raise LiveUnavailable(f"Redis is away: {error}") from error


def send_command(
    actor: str,
    kind: str,
    request_ids: list[str],
    priority: int | None = None,
    *,
    valid_s: float = 5.0,
    wait_s: float = 2.0,
) -> Answers:
    """Tell every gateway, and wait for their answers (one each). A gateway that does not answer in time is missing.
    Raises LiveUnavailable where nobody was told, AnswersLost where somebody may have been."""
    message = CommandMessage(
        id=uuid.uuid4().hex,
        actor=actor,
        kind=kind,
        request_ids=request_ids,
        priority=priority,
        expires_at=_run(lambda client: _seconds(client.time())) + valid_s,
    )
    return _ask(_client(_settings().REDIS_URL), _run(_gateways), message, wait_s)


def _ask(client: redis.Redis, gateways: Sequence[str], message: CommandMessage, wait_s: float) -> Answers:
    raw, answers = orjson.dumps(message), Answers()
    key = COMMAND_ANSWER_KEY.format(command=message["id"])
    try:
        heard = sum(int(client.publish(COMMAND_CHANNEL.format(gateway=g), raw)) for g in gateways)
        give_up_at = time.monotonic() + wait_s
        while len(answers) < heard and (left := give_up_at - time.monotonic()) > 0:
            # Shorter than the socket's own time-out, which would end the call with an error.
            if (popped := client.blpop([key], timeout=min(left, CALL_S / 2))) is not None:
                answers.append(orjson.loads(popped[1]))
    except _AWAY as error:
        raise AnswersLost(f"Redis went away before the gateways' answers had come: {error}", answers) from error
    answers.silent = heard - len(answers)
    return answers
