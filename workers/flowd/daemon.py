"""The transfer daemon: one for each host, on a Unix socket. Its decisions are `controller.flow.gate`'s.

Messages are JSON, one a line. A client submits each transfer once and then reports how far it is:

- `submit`: `id`, `stage` (1 to 4), `size_bytes`, `to` (where it goes), `due_in_s` (KV transfers: seconds until the last
  byte is due), and optionally `unit`, `batch`, `requests`, `layer`, `later_bytes`, and `over`: `link` (the default) or
  `memory`, for what is read from a copy in this host's memory and takes nothing of its link. `target_in_s`: when it
  was meant to arrive, negative if that is over, null if there is no target. It is shown only; without it, `due_in_s`.
- `progress`: `id`, `left` bytes, `waiting` (nothing to send now), and optionally `layer`, which waits for its next
  bytes. Without it for `lease_s` the transfer is dropped.
- `urgent`: `id`: an end of it is short of memory. `completion`: `id`, and
  `left` bytes if it was given up. `status`.
- `queue`: `id`. Answered by `queue` with `id` and `seconds`: how long the link takes for what transfers of requests
  have left to send. Those that wait for their computing do not count, nor do weights.
- `layer`: `unit`, `batch`, `layer`: the unit computes this layer of the batch now, from 0. KV transfers of the batch
  are promoted then, and after `computed` (`unit`, `batch`) at fixed intervals.

First of all, and when the flow policy changes, it says `policy`. While that is `off`, a `submit` is answered with
`off`: nothing is scheduled. Flows that go on then end by the policy with which they began.

The daemon answers a `submit` with a `permit` or an `error`, and pushes further permits as things change: `id`, `go`
(false: hold it), `level` (1 to 8), `class` (of its packets, 0 first). An `error` names the `field`. `expired`: `id` is
no longer scheduled. `alive` comes every second, so that a client sees a daemon that hangs. A client that goes away ends
its transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import uvloop

from controller.core.errors import ConfigError, SlacklineError
from controller.core.messages import HostFlows
from controller.core.pruning import OrdersInForce, PruningOrders
from controller.flow.flows import STAGES, FlowStage, MsFlow
from controller.flow.gate import GATED, OFF, Expired, Gate, GateAction, GateConfig, Go
from controller.flow.policies import FLOW_POLICIES
from controller.flow.scheduler import FlowScheduler, FlowSchedulerConfig, NotTaken, OrderSent
from workers.flowd.client import LINK, MEMORY
from workers.flowd.lines import line_batches
from workers.flowd.pauses import StepPauses
from workers.flowd.report import FlowHistory, exchange, first, keep_obeying, keep_reporting, port_loads
from workers.flowd.settings import FlowdSettings
from workers.live import LiveState

# The port of each resource that a transfer can take bandwidth of. Everything leaves this host through one link.
EGRESS = {LINK: "out", MEMORY: "memory"}
PERIOD_S = 0.02  # how often transfers may be promoted
ALIVE_S = 1.0
MAX_LINE = 16 << 10
MOST_FLOWS = 20_000
MOST_NUMBER = 1e18  # of bytes or seconds: with far larger ones a time would become infinite, and no step end
MOST_DUE_S = 1e6
MOST_BATCHES = 1_000  # that a client computes
MOST_UNREAD = 1 << 20  # bytes that a client has not read; beyond it is disconnected
SHORTEST_PAUSE_S = 0.001
# What a client calls a field, where it differs.
SAID = {"ingress": "to", "deadline": "due_in_s"}
OPS = ("submit", "progress", "urgent", "completion", "layer", "computed", "queue", "status")
log = logging.getLogger("workers.flowd")


class Refused(SlacklineError):
    """What a client sent is wrong. `field`: in what."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class FlowDaemon:
    """Serves clients on a Unix socket, with one gate over all of their transfers. While the policy changes there are
    several: those of policies before, until their transfers have ended, and the one for new transfers."""

    def __init__(self, settings: FlowdSettings, config: GateConfig | None = None) -> None:
        self._path = settings.socket
        self._policy = settings.policy
        self._bandwidth, self._config = settings.bandwidth, config
        self._receives_at = settings.receives_at
        self._orders = OrdersInForce()  # of the coordinator of pruning
        self._order: OrderSent | None = None  # the last one that was taken
        self._gate = self._gate_of(settings.policy)  # of new flows; None: they are not scheduled
        self._ending: list[Gate] = []  # of policies before, with flows
        self._owners: dict[str, tuple[asyncio.StreamWriter, Gate]] = {}
        self._history = FlowHistory()
        self._batches: dict[asyncio.StreamWriter, set[tuple[str, str]]] = {}  # that they compute
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._next: asyncio.TimerHandle | None = None
        self._pending = False  # a step is due
        self._stepped_at = self._pause_s = 0.0  # end of the last step, and least pause after it
        self._pauses = StepPauses()
        self._ticker: asyncio.Task[None] | None = None

    def _gate_of(self, policy: str) -> Gate | None:
        if policy == OFF:
            return None
        scheduler = FlowScheduler(FLOW_POLICIES[policy](), FlowSchedulerConfig(PERIOD_S, lazy=True))
        gate = Gate(scheduler, self._bandwidth, self._config)
        if self._order is not None:
            gate.obey(self._order)
        return gate

    def follow(self, policy: str) -> None:
        """Schedule new flows by this policy, or not at all (OFF). Those that go on end as they began: the gates of two
        policies know nothing of each other, so for that long the link is shared between them."""
        if policy == self._policy:
            return
        if policy not in (OFF, *GATED):
            log.warning(
                "the stored flow policy is %r, which this release does not know: %s stays", policy, self._policy
            )
            return
        log.info("%s instead of %s", policy, self._policy)
        if self._gate is not None and len(self._gate):
            self._ending.append(self._gate)
        self._policy, self._gate = policy, self._gate_of(policy)
        for writer in list(self._clients):
            self._say_policy(writer)

    def obey(self, orders: PruningOrders, left_s: float) -> None:
        """Send transfers of the requests that these orders prune after all others, and those of equal urgency in their
        order, for `left_s` seconds from now."""
        now = self._now()
        self._orders.end_if_over(now)
        if self._orders.admit(orders.sequence, now + left_s, now):
            scavengers = frozenset(orders.scavengers)
            self._order = OrderSent(orders.sequence, orders.order, scavengers, now + left_s)
            for gate in self._gates():
                gate.obey(self._order)
            self._soon()

    def _gates(self) -> Iterator[Gate]:
        yield from self._ending
        if self._gate is not None:
            yield self._gate

    # ---- serving ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises ConfigError if another daemon serves the socket or it cannot be made."""
        _remove_stale(self._path)
        before = os.umask(0o177)  # only this user may connect
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        except OSError as error:
            raise ConfigError(f"FLOW_SOCKET {self._path}: {error}", "FLOW_SOCKET") from error
        finally:
            os.umask(before)
        self._ticker = asyncio.get_running_loop().create_task(self._say_alive())
        log.info("%s on %s", self._policy, self._path)

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._next is not None:
            self._next.cancel()
        if self._server is not None:
            self._server.close()
            Path(self._path).unlink(missing_ok=True)
        for writer in self._clients:
            writer.close()
        await asyncio.gather(*filter(None, self._clients.values()), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = asyncio.current_task()
        self._say_policy(writer)
        try:
            async for lines in line_batches(reader, MAX_LINE):
                for line in lines:
                    self._heard(line, writer)
        except (ValueError, OSError) as error:  # ValueError: a line beyond the limit
            log.warning("a client was disconnected: %s", error)
        finally:
            self._clients.pop(writer, None)
            for named in self._batches.pop(writer, ()):
                self._computed(*named)
            for flow_id in [flow_id for flow_id, (owner, _) in self._owners.items() if owner is writer]:
                self._forget(flow_id, "lost")
            writer.close()
            self._soon()

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            for writer in list(self._clients):
                _say(writer, {"event": "alive"})

    def _say_policy(self, writer: asyncio.StreamWriter) -> None:
        _say(writer, {"event": "policy", "policy": self._policy})

    # ---- what clients say -------------------------------------------------------------------------------------------

    def _heard(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        said: Any = None
        try:
            said = orjson.loads(line)
            if not isinstance(said, dict):
                raise Refused("op", "a message is a JSON object")
            if self._take(said, writer):
                self._soon()
        except orjson.JSONDecodeError as error:
            _say(writer, {"event": "error", "id": "", "field": "", "message": f"not JSON: {error}"})
        except (Refused, ConfigError) as error:
            name = error.field or ""
            flow_id = said.get("id") if isinstance(said, dict) else ""
            about = {"id": flow_id if isinstance(flow_id, str) else "", "field": SAID.get(name, name)}
            _say(writer, {"event": "error", **about, "message": str(error)})

    def _take(self, said: Mapping[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Returns whether it may change who sends. Raises Refused and ConfigError."""
        op = said.get("op")
        if op == "status":
            _say(writer, self.status())
            return False
        if op in ("layer", "computed"):
            self._computes(said, writer)
            return True
        flow_id = _text(said, "id")
        if op == "queue":
            seconds = sum(gate.queued_bytes(EGRESS[LINK]) for gate in self._gates()) / self._bandwidth
            _say(writer, {"event": "queue", "id": flow_id, "seconds": seconds})
            return False
        if op == "submit":
            return self._submit(said, writer)
        if op not in ("progress", "urgent", "completion"):
            raise Refused("op", f"unknown op {op!r}; valid: {', '.join(OPS)}")
        owner, gate = self._owners.get(flow_id, (None, None))
        if owner is not writer or gate is None:
            raise Refused("id", f"flow {flow_id!r} is not one of yours")
        if op == "progress":
            left, layer = _number(said, "left"), _whole(said, "layer") if "layer" in said else None
            self._history.moved(flow_id, left)
            changed = gate.progress(flow_id, left, _flag(said, "waiting"), self._now())
            needed = layer is not None and gate.needed_by(flow_id, layer)
            return changed or needed
        if op == "urgent":
            gate.press(flow_id)
        else:
            self._history.moved(flow_id, _number(said, "left", 0.0))
            self._forget(flow_id, "ended")
        return True

    def _submit(self, said: Mapping[str, Any], writer: asyncio.StreamWriter) -> bool:
        now = self._now()
        flow, target_in_s = _flow(said, now), _target(said)
        if self._gate is None:  # the client had not heard yet that the policy is off
            _say(writer, {"event": "off", "id": flow.id})
            return False
        if len(self._owners) >= MOST_FLOWS:
            raise Refused("id", f"there are {MOST_FLOWS} flows already")
        if flow.id in self._owners:
            raise Refused("id", f"flow {flow.id!r} was submitted before")
        if (wrong := self._gate.submit(flow, now)) is not None:
            raise Refused(wrong.field, wrong.message)
        self._owners[flow.id] = writer, self._gate
        self._history.submitted(flow, now, None if target_in_s is None else now + target_in_s)
        return True

    def _computes(self, said: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        """A layer of a batch began, or all of them are computed. Raises Refused."""
        named = _text(said, "unit"), _text(said, "batch")
        batches = self._batches.setdefault(writer, set())
        if said["op"] == "computed":
            batches.discard(named)
            self._computed(*named)
            return
        if named not in batches and len(batches) >= MOST_BATCHES:
            raise Refused("batch", f"this client computes {MOST_BATCHES} batches already")
        layer = _whole(said, "layer")
        batches.add(named)
        for gate in self._gates():
            gate.layer_started(*named, layer, self._now())

    def _computed(self, unit: str, batch: str) -> None:
        for gate in self._gates():
            gate.computed(unit, batch)

    def _forget(self, flow_id: str, end: str) -> None:
        _, gate = self._owners.pop(flow_id, (None, None))
        if gate is not None:
            gate.end(flow_id)
            self._history.over(flow_id, end, self._now())

    # ---- what they are told -----------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Step once for all that was heard meanwhile."""
        if not self._pending:
            self._pending = True
            loop = asyncio.get_running_loop()
            loop.call_at(self._stepped_at + self._pause_s, self._step)

    def _step(self) -> None:
        """Say what has changed, and come back when the gate asks for it."""
        now, self._pending = self._now(), False
        worked_from = time.thread_time()  # a busy machine makes a short step late, which is no reason for a pause
        wake_at = math.inf
        told: dict[asyncio.StreamWriter, list[Mapping[str, Any]]] = {}
        for gate in list(self._gates()):
            actions, next_at = gate.step(now)
            wake_at = min(wake_at, next_at)
            for action in actions:
                writer, _ = self._owners.get(action.flow_id, (None, None))
                if writer is not None:
                    told.setdefault(writer, []).append(self._told(action, now))
        for writer, messages in told.items():
            _say(writer, *messages)
        self._ending = [gate for gate in self._ending if len(gate)]
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._stepped_at, self._pause_s = self._now(), self._pauses.after(time.thread_time() - worked_from)
        if math.isfinite(wake_at):
            pause_s = max(wake_at - now, SHORTEST_PAUSE_S, self._pause_s)
            self._next = asyncio.get_running_loop().call_later(pause_s, self._step)

    def _told(self, action: GateAction, now: float) -> dict[str, Any]:
        """Note it in the history, and return what its client is told."""
        if isinstance(action, Go):
            self._history.told(action.flow_id, action.go, action.turn.wire_class + 1, now)
        else:
            self._owners.pop(action.flow_id, None)
            self._history.over(action.flow_id, "expired", now)
        match action:
            case Go(flow_id, go, turn):
                level = {"level": turn.wire_class + 1, "class": turn.wire_class}
                return {"event": "permit", "id": flow_id, "go": go, **level}
            case Expired(flow_id):
                return {"event": "expired", "id": flow_id}
            case NotTaken(flow_id, field, message):
                return {"event": "error", "id": flow_id, "field": SAID.get(field, field), "message": message}

    def status(self) -> dict[str, Any]:
        """All transfers, the first to send first."""
        flows = [view for gate in self._gates() for view in gate.view(self._now())]
        self._orders.end_if_over(self._now())
        about = {"policy": self._policy, "bandwidth": self._bandwidth, "orders": dict(self._orders.taken)}
        return {"event": "status", **about, "flows": flows}

    @property
    def sends_kv(self) -> bool:
        """Whether KV of a request is open."""
        return self._history.sends_kv

    def report(self, host: str) -> HostFlows:
        """What the console shows of this host."""
        now = self._now()
        views = [view for gate in self._gates() for view in gate.view(now)]
        self._orders.end_if_over(now)
        return {
            "host": host,
            "at": 0.0,  # set when it is published
            "policy": self._policy,
            "bandwidth": self._bandwidth,
            "ports": port_loads(views, self._history.rates(EGRESS.values(), now)),
            "open": len(views),
            "ending": sum(map(len, self._ending)),
            "orders": dict(self._orders.taken),
            "receives_at": list(self._receives_at),
            "flows": list(self._history.shown(first(views), now)),
        }

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _remove_stale(path: str) -> None:
    """Remove the socket of a daemon that was killed. Raises ConfigError if one still serves it, or if it is a file."""
    if not Path(path).exists():
        return
    if not Path(path).is_socket():
        raise ConfigError(f"FLOW_SOCKET {path} is a file that is not a socket", "FLOW_SOCKET")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            Path(path).unlink(missing_ok=True)
            return
    raise ConfigError(f"FLOW_SOCKET {path}: another transfer daemon serves it", "FLOW_SOCKET")


def _say(writer: asyncio.StreamWriter, *messages: Mapping[str, Any]) -> None:
    """With one call of the kernel for all of them, which costs more than making them."""
    if writer.is_closing():
        return
    if writer.transport.get_write_buffer_size() > MOST_UNREAD:
        writer.transport.abort()
        return
    writer.write(b"".join([orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE) for message in messages]))


# ---- reading a submit -----------------------------------------------------------------------------------------------


def _flow(said: Mapping[str, Any], now: float) -> MsFlow:
    """Raises Refused or ConfigError with the field that is wrong."""
    stage = said.get("stage")
    if isinstance(stage, bool) or stage not in STAGES:
        valid = ", ".join(f"{int(each)} ({each.name.lower()})" for each in STAGES)
        raise Refused("stage", f"unknown stage {stage!r}; valid: {valid}")
    due_in_s = None if said.get("due_in_s") is None else _number(said, "due_in_s")
    if due_in_s is not None and due_in_s <= 0:
        raise Refused("due_in_s", f"the deadline has passed: due_in_s is {due_in_s:g}")
    if due_in_s is not None and due_in_s > MOST_DUE_S:
        raise Refused("due_in_s", f"due_in_s is at most {MOST_DUE_S:g}")
    requests = said.get("requests", [])
    if not isinstance(requests, list) or not all(isinstance(each, str) for each in requests):
        raise Refused("requests", "requests is a list of ids")
    over = said.get("over", LINK)
    if over not in EGRESS:
        raise Refused("over", f"over is {' or '.join(EGRESS)}, not {over!r}")
    return MsFlow(
        id=_text(said, "id"),
        stage=FlowStage(stage),
        size_bytes=_number(said, "size_bytes"),
        egress=EGRESS[over],
        ingress=f"in:{_text(said, 'to')}",
        unit=_text(said, "unit", ""),
        batch=_text(said, "batch", ""),
        requests=tuple(requests),
        layer=_whole(said, "layer"),
        deadline=None if due_in_s is None else now + due_in_s,
        later_bytes=_number(said, "later_bytes", 0.0),
    )


def _target(said: Mapping[str, Any]) -> float | None:
    """Seconds until it should arrive, for people. Raises Refused."""
    name = "target_in_s" if "target_in_s" in said else "due_in_s"
    return None if said.get(name) is None else _number(said, name)


def _text(said: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = said.get(name, default)
    if not isinstance(value, str) or (default is None and not value) or len(value) > 500:
        raise Refused(name, f"{name} is a text of at most 500 characters")
    return value


def _number(said: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(name, f"{name} is a number, not {value!r}")
    if value > MOST_NUMBER:
        raise Refused(name, f"{name} is at most {MOST_NUMBER:g}")
    return float(value)


def _whole(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused(name, f"{name} is a whole number, from 0")
    return value


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise Refused(name, f"{name} is true or false")
    return value


# ---- the process ----------------------------------------------------------------------------------------------------


def run(settings: FlowdSettings) -> int:
    """Serve until stopped. Returns the exit status."""
    if settings.policy == OFF and not settings.redis_url:
        log.error("FLOW_POLICY is off, and without REDIS_URL no other policy can be set: there is nothing to schedule")
        return 1
    try:
        uvloop.run(_until_stopped(settings))
    except ConfigError as error:
        log.error("%s", error)
        return 1
    return 0


async def _until_stopped(settings: FlowdSettings) -> None:
    daemon = FlowDaemon(settings)
    live = LiveState(settings.redis_url) if settings.redis_url else None
    # Before it serves, so that the first flow has the stored policy.
    away = live is not None and not await exchange(daemon, live, settings.host)
    await daemon.start()
    gc.freeze()  # imported modules stay, so that no collection looks at them while transfers wait
    tasks = []
    if live is not None:
        reporting = keep_reporting(daemon, live, settings.host, away=away)
        tasks = [asyncio.create_task(each) for each in (reporting, keep_obeying(daemon, live))]
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(OSError):
            await daemon.close()
