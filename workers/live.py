"""Live state in Redis, and messages to browsers. All other modules read and write both through this one.

Redis holds only data that can be rebuilt, and it may be unavailable or hang at any time: every Redis command here ends
within `CALL_S` and raises LiveUnavailable. Functions with plain names are for synchronous callers (tasks, pages, the
control API), those whose names start with `a` for an event loop. `LiveState` is the asynchronous client; a gateway has
one, and each event loop of the console has one.

What both need is written once, as a generator (`Dialogue`) that yields Redis commands and receives their results.
`run` executes it with the synchronous client, `LiveState.run` with the asynchronous one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from functools import lru_cache
from itertools import count
from typing import Any, Protocol, TypeVar
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
    FLOW_POLICY_KEY,
    GATEWAYS_KEY,
    HEARTBEAT_KEY,
    HOST_FLOWS_KEY,
    LEASE_KEY,
    LIVE_DECISIONS,
    LIVE_EXPERIMENTS,
    LIVE_QUEUE,
    LIVE_TYPE,
    PRUNING_CHANNEL,
    QUEUE_ASKED_KEY,
    QUEUE_KEY,
    TELEMETRY_KEY,
    WATCHED_KEY,
    CommandAnswer,
    CommandMessage,
    ExperimentMessage,
    FleetMessage,
    HostFlows,
    LiveMessage,
    QueueState,
)
from controller.core.pruning import PruningOrders, orders_from_json
from controller.wording.sentences import StoredDecision, message_of
from workers.cancellations import cancellations, heed
from workers.shared_clock import SharedClock

log = logging.getLogger(__name__)

T = TypeVar("T")
Command = tuple[Any, ...]  # of Redis: its name and arguments
Dialogue = Generator[Command, Any, T]

CALL_S = 1.0  # the longest that one Redis command may take
WATCHED_S = 10  # a topic counts as watched for this long after a browser asked for it
LEAST_AHEAD_S = 0.05  # a smaller difference of two clocks changes no decision
QUEUE_KEPT_S = 10
ANSWER_KEPT_S = 30
HOST_FLOWS_KEPT_S = 3600
_AWAY = (RedisError, OSError, TimeoutError)
_TIMEOUTS: dict[str, float] = {"socket_timeout": CALL_S, "socket_connect_timeout": CALL_S}

# Only the holder may renew the lease, so reading and writing it must be one atomic operation.
_RENEW = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return 1 end
if holder then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class Talks(Protocol):
    """Whoever runs dialogues with Redis: a `LiveState`, or what a test puts in its place."""

    async def run(self, dialogue: Dialogue[T]) -> T: ...


class LiveUnavailable(SlacklineError, ConnectionError):
    """Redis is unavailable or hangs. Also a ConnectionError, which callers that bound any I/O expect."""


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


def orders_of(value: bytes) -> PruningOrders | None:
    """None for anything but orders of the coordinator of pruning, such as those of another release."""
    try:
        return orders_from_json(orjson.loads(value))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _live(topic: str, seq: int, data: Any) -> dict[str, Any]:
    message = LiveMessage(topic=topic, seq=seq, at=time.time(), data=data)
    return {"type": LIVE_TYPE, "message": message}


class Answers(list[CommandAnswer]):
    """The answers to a command, one from each gateway. `silent`: the number of gateways that received the command and
    did not answer in time."""

    silent = 0


class AnswersLost(LiveUnavailable):
    """Redis failed while a command was sent or answered, so gateways may have applied it. `answers`: those received
    until then."""

    def __init__(self, message: str, answers: Answers) -> None:
        super().__init__(message)
        self.answers = answers


# ---- what synchronous and asynchronous callers share ----------------------------------------------------------------


def gateways() -> Dialogue[list[str]]:
    members = yield ("SMEMBERS", GATEWAYS_KEY)
    return sorted(_text(member) for member in members)


def _published(key: str, clock: SharedClock) -> Dialogue[list[Any]]:
    """The message that each gateway has stored under `key`, ordered by gateway. Redis' own time goes to `clock`."""
    names = yield from gateways()
    if not names:
        return []
    yield from _hear(clock)
    values = yield ("MGET", *(key.format(gateway=name) for name in names))
    return _messages(values)


def _hear(clock: SharedClock) -> Dialogue[float]:
    """Redis' own time goes to `clock`, and is returned."""
    sent = time.monotonic()
    told = _seconds((yield ("TIME",)))
    clock.heard(told, sent, time.monotonic())
    return told


def server_time() -> Dialogue[float]:
    """Redis' own clock, epoch seconds."""
    return _seconds((yield ("TIME",)))


def _mark_watched(topic: str) -> Dialogue[None]:
    yield ("SET", WATCHED_KEY.format(topic=topic), b"1", "EX", WATCHED_S)


def _ask_queue() -> Dialogue[int]:
    yield from _mark_watched(LIVE_QUEUE)
    return int((yield ("INCR", QUEUE_ASKED_KEY)))


def _exchange_flows(message: HostFlows, clock: SharedClock) -> Dialogue[str | None]:
    message["at"] = yield from _hear(clock)
    yield ("HSET", HOST_FLOWS_KEY, message["host"], orjson.dumps(message))
    yield ("EXPIRE", HOST_FLOWS_KEY, HOST_FLOWS_KEPT_S)
    policy = yield ("GET", FLOW_POLICY_KEY)
    return None if policy is None else _text(policy)


def host_flows() -> Dialogue[list[HostFlows]]:
    """The newest report of each transfer daemon in the last hour, by host, with `at` on this host's clock."""
    now = yield from server_time()
    messages: list[HostFlows] = _messages((yield ("HVALS", HOST_FLOWS_KEY)))
    for message in messages:
        message["at"] += time.time() - now
    return sorted(
        (each for each in messages if time.time() - each["at"] < HOST_FLOWS_KEPT_S), key=lambda each: each["host"]
    )


# ---- asynchronous: gateways and consumers ---------------------------------------------------------------------------


class LiveState:
    """The asynchronous client. `gateway`: the id of the gateway that publishes; "" for a process that only reads. Times
    that it reads or writes are those of `clock`."""

    def __init__(self, url: str, gateway: str = "") -> None:
        self.gateway = gateway
        self.clock = SharedClock()
        self._redis = AsyncRedis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **_TIMEOUTS)  # type: ignore[arg-type]
        self._listener = AsyncRedis.from_url(url, socket_connect_timeout=CALL_S, socket_timeout=None)
        self._renew = self._redis.register_script(_RENEW)
        self._seq = count(1)

    async def _call(self, work: Awaitable[T]) -> T:
        before = cancellations()
        try:
            async with asyncio.timeout(CALL_S):
                result = await work
        except _AWAY as error:
            heed(before)
            raise LiveUnavailable(f"Redis is unavailable: {error}") from error
        heed(before)
        return result

    async def run(self, dialogue: Dialogue[T]) -> T:
        """The result of the dialogue. Each of its commands takes at most CALL_S; raises LiveUnavailable."""
        result = None
        while True:
            try:
                command = dialogue.send(result)
            except StopIteration as end:
                return end.value
            result = await self._call(self._redis.execute_command(*command))

    async def server_time(self) -> float:
        """Redis' own clock, epoch seconds."""
        return _seconds(await self._call(self._redis.time()))

    # ---- telemetry ------------------------------------------------------------------------------------------------

    async def lease(self, what: str, ttl_s: float) -> bool:
        """Take or renew the lease; True if this gateway holds it. Call again before `ttl_s` is over to keep it."""
        keys, ttl_ms = [LEASE_KEY.format(what=what)], int(ttl_s * 1000)
        return bool(await self._call(self._renew(keys=keys, args=[self.gateway, ttl_ms])))

    async def publish_telemetry(self, loads: dict[str, dict[str, Any]], ttl_s: float) -> None:
        """`loads`: telemetry by instance id, with `observed_at` on the shared clock."""
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
        """Those of the topics that a browser watches."""
        names = list(topics)
        values = await self._call(self._redis.mget([WATCHED_KEY.format(topic=name) for name in names]))
        return {name for name, value in zip(names, values, strict=True) if value is not None}

    async def amark_watched(self, topic: str) -> None:
        await self.run(_mark_watched(topic))

    async def publish_fleet(self, message: FleetMessage, ttl_s: float) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.sadd(GATEWAYS_KEY, self.gateway)
        pipe.set(FLEET_KEY.format(gateway=self.gateway), orjson.dumps(message), px=int(ttl_s * 1000))
        await self._call(pipe.execute())

    async def publish_queue(self, state: QueueState) -> None:
        key = QUEUE_KEY.format(gateway=self.gateway)
        await self._call(self._redis.set(key, orjson.dumps(state), ex=QUEUE_KEPT_S))

    async def queue_asked(self) -> int:
        """The number of requests for whole queues so far."""
        return int(await self._call(self._redis.get(QUEUE_ASKED_KEY)) or 0)

    async def aask_queue(self) -> int:
        return await self.run(_ask_queue())

    async def exchange_flows(self, message: HostFlows) -> str | None:
        """Publish what a transfer daemon schedules. Returns the stored flow policy, None if none is known."""
        return await self.run(_exchange_flows(message, self.clock))

    async def leave(self) -> None:
        """Remove this gateway's state at shutdown, so that pages need not wait until it expires."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.srem(GATEWAYS_KEY, self.gateway)
        pipe.delete(FLEET_KEY.format(gateway=self.gateway), QUEUE_KEY.format(gateway=self.gateway))
        await self._call(pipe.execute())

    async def aread_fleet(self) -> list[FleetMessage]:
        return await self.run(_published(FLEET_KEY, self.clock))

    async def aread_queue(self) -> list[QueueState]:
        return await self.run(_published(QUEUE_KEY, self.clock))

    # ---- browsers -------------------------------------------------------------------------------------------------

    async def send(self, topic: str, data: Any) -> None:
        """Send to every browser that watches the topic. A message is delivered at most once; gaps in `seq` show
        losses."""
        from channels.layers import get_channel_layer

        await self._call(get_channel_layer().group_send(topic, _live(topic, next(self._seq), data)))

    # ---- commands and notices -------------------------------------------------------------------------------------

    async def listen(self) -> AsyncIterator[CommandMessage | PruningOrders | int]:
        """Yields commands to this gateway, orders of the coordinator of pruning, and configuration versions (int).
        Raises LiveUnavailable if the connection is lost."""
        mine = COMMAND_CHANNEL.format(gateway=self.gateway).encode()
        pubsub = self._listener.pubsub(ignore_subscribe_messages=True)
        try:
            await self._call(pubsub.subscribe(mine, CONFIG_CHANNEL, PRUNING_CHANNEL))
            while True:
                message = await pubsub.get_message(timeout=5.0)
                if message is None:
                    await self._call(pubsub.ping())
                elif message["type"] == "message" and message["channel"] == PRUNING_CHANNEL.encode():
                    if (orders := orders_of(message["data"])) is not None:
                        yield orders
                elif message["type"] == "message":
                    data = orjson.loads(message["data"])
                    yield data if message["channel"] == mine else int(data)
        except (*_AWAY, orjson.JSONDecodeError) as error:
            raise LiveUnavailable(f"Redis is unavailable: {error}") from error
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
    state: LiveState,
    on_command: Callable[[CommandMessage], None],
    on_config: Callable[[int], None],
    on_orders: Callable[[PruningOrders], None],
) -> None:
    """Pass commands, configuration versions and orders on, until cancelled. Reconnects after an outage of Redis."""
    pause_s = 0.5
    while True:
        try:
            async with aclosing(state.listen()) as heard:  # type: ignore[type-var]
                async for message in heard:
                    pause_s = 0.5
                    if isinstance(message, int):
                        on_config(message)
                    elif isinstance(message, PruningOrders):
                        on_orders(message)
                    else:
                        on_command(message)
        except LiveUnavailable:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)


# ---- asynchronous, for consumers: one LiveState for each event loop -------------------------------------------------

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
    """The newest state of each gateway that published lately, with `at` on the shared clock."""
    return await _state().aread_fleet()


async def aread_queue() -> list[QueueState]:
    """See `read_queue`."""
    return await _state().aread_queue()


async def aask_queue() -> int:
    """See `ask_queue`."""
    return await _state().aask_queue()


async def amark_watched(topic: str) -> None:
    """Have gateways publish this topic for WATCHED_S more, since a browser watches it."""
    await _state().amark_watched(topic)


# ---- synchronous: tasks, pages and the control API ------------------------------------------------------------------


@lru_cache(maxsize=4)
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_TIMEOUTS)


def run(dialogue: Dialogue[T]) -> T:
    """The result of the dialogue. Each of its commands takes at most CALL_S; raises LiveUnavailable."""
    client, result = _client(_settings().REDIS_URL), None
    while True:
        try:
            command = dialogue.send(result)
        except StopIteration as end:
            return end.value
        try:
            result = client.execute_command(*command)
        except _AWAY as error:
            raise LiveUnavailable(f"Redis is unavailable: {error}") from error


def read_fleet() -> list[FleetMessage]:
    """The newest state of each gateway that published lately, with `at` on this host's clock; check it before acting on
    it."""
    return _read(FLEET_KEY)


def read_queue() -> list[QueueState]:
    """The whole queue of each gateway, as of the last request for it (`ask_queue`)."""
    return _read(QUEUE_KEY)


def ask_queue() -> int:
    """Have each gateway publish its whole queue. It does within about half a second, with the number returned here, or
    a higher one, in `asked`."""
    return run(_ask_queue())


def _read(key: str) -> list[Any]:
    clock = SharedClock()
    messages = run(_published(key, clock))
    ahead = clock.ahead_of_wall()
    if abs(ahead) >= LEAST_AHEAD_S:
        for message in messages:
            message["at"] -= ahead
    return messages


def read_heartbeats(processes: Sequence[str]) -> dict[str, float]:
    """When each process (worker, beat) last sent a heartbeat, epoch seconds; without those that sent none lately."""

    def read() -> Dialogue[list[bytes | None]]:
        return (yield ("MGET", *(HEARTBEAT_KEY.format(process=name) for name in processes)))

    values = run(read())
    return {name: float(value) for name, value in zip(processes, values, strict=True) if value is not None}


def evaluate(script: str, keys: Sequence[str], *arguments: str | int) -> Any:
    """Run a Lua script in Redis, as one atomic step. It must use no other keys."""

    def evaluated() -> Dialogue[Any]:
        return (yield ("EVAL", script, len(keys), *keys, *arguments))

    return run(evaluated())


def lease(what: str, holder: str, ttl_s: float) -> bool:
    """Take or renew the lease; True if `holder` has it. Call again before `ttl_s` is over to keep it."""
    return bool(evaluate(_RENEW, [LEASE_KEY.format(what=what)], holder, int(ttl_s * 1000)))


def read_host_flows() -> list[HostFlows]:
    """The newest report of each transfer daemon in the last hour, by host, with `at` on this host's clock."""
    return run(host_flows())


def publish_flow_policy(policy: str | None) -> None:
    """For transfer daemons, which read it each second. None: nothing is stored, so they follow their FLOW_POLICY."""

    def publish() -> Dialogue[None]:
        yield ("DEL", FLOW_POLICY_KEY) if policy is None else ("SET", FLOW_POLICY_KEY, policy)

    run(publish())


def notify_config(version: int) -> None:
    """Have gateways read the configuration at once. Without it they do so within half a second."""

    def publish() -> Dialogue[None]:
        yield ("PUBLISH", CONFIG_CHANNEL, str(version))

    run(publish())


def announce(decision: StoredDecision | None) -> None:
    """Log a decision and send it to the browsers that watch decisions. Call it after the transaction has committed.

    Never raises: the decision is stored already, and a browser that misses the message sees the decision when it next
    reads the list.
    """
    if decision is None:
        return
    message = message_of(decision)
    log.info("decision %s (%s, %s): %s", decision.pk, decision.kind, decision.reason, message["sentence"])
    try:
        send_to_group(LIVE_DECISIONS, _live(LIVE_DECISIONS, 0, message))
    except LiveUnavailable as error:
        log.warning("decision %s was not sent to browsers: %s", decision.pk, error)


def send_experiment(message: ExperimentMessage) -> None:
    """Send the progress of an experiment to the browsers that watch experiments."""
    send_to_group(LIVE_EXPERIMENTS, _live(LIVE_EXPERIMENTS, 0, message))


def send_to_group(group: str, event: dict[str, Any]) -> None:
    """Send to the sockets of a group of the channel layer; the event's `type` names the method that receives it."""
    from asgiref.sync import async_to_sync
    from channels.layers import get_channel_layer

    async def deliver() -> None:
        async with asyncio.timeout(CALL_S):
            await get_channel_layer().group_send(group, event)

    try:
        async_to_sync(deliver)()
    except _AWAY as error:
        raise LiveUnavailable(f"Redis is unavailable: {error}") from error


def send_command(
    actor: str,
    kind: str,
    request_ids: list[str],
    priority: int | None = None,
    *,
    valid_s: float = 5.0,
    wait_s: float = 2.0,
) -> Answers:
    """Send a queue command to every gateway and wait up to `wait_s` for the answers, one from each. A gateway that does
    not answer in time is missing from them; after `valid_s` it no longer applies the command.

    Raises LiveUnavailable if no gateway received the command, and AnswersLost if one may have.
    """
    message = CommandMessage(
        id=uuid.uuid4().hex,
        actor=actor,
        kind=kind,
        request_ids=request_ids,
        priority=priority,
        expires_at=run(server_time()) + valid_s,
    )
    return _send_and_wait(_client(_settings().REDIS_URL), run(gateways()), message, wait_s)


def _send_and_wait(client: redis.Redis, gateways: Sequence[str], message: CommandMessage, wait_s: float) -> Answers:
    raw, answers = orjson.dumps(message), Answers()
    key = COMMAND_ANSWER_KEY.format(command=message["id"])
    try:
        received = sum(int(client.publish(COMMAND_CHANNEL.format(gateway=g), raw)) for g in gateways)
        give_up_at = time.monotonic() + wait_s
        while len(answers) < received and (left := give_up_at - time.monotonic()) > 0:
            # Shorter than the socket's own timeout, which would end the call with an error.
            if (popped := client.blpop([key], timeout=min(left, CALL_S / 2))) is not None:
                answers.append(orjson.loads(popped[1]))
    except _AWAY as error:
        raise AnswersLost(f"Redis became unavailable before all gateways had answered: {error}", answers) from error
    answers.silent = received - len(answers)
    return answers
