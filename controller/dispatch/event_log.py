"""A log of a scheduler's events and actions: JSON lines that a gateway writes and a simulation replays.

The first line says which policy set the scheduler was built from. Every other line is one call of `Scheduler.handle`:
its time, events, actions and wake-up. Events and actions are named tuples of other named tuples, dataclasses, enums and
numbers, so one codec is enough: `[name, {field: value}]`, without fields that have their default value. A request is
written in full when it first appears and by its id afterwards, since all refer to the same object.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import Request

KIND, VERSION = "slackline scheduler log", 1
_EVENTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(ev.Event)}


class Header(NamedTuple):
    """What the scheduler was built from, as for `build_scheduler`."""

    policy: str
    overrides: Mapping[str, Any]


class LoggedBatch(NamedTuple):
    """One call of `handle`. `actions` as they were written: what is replayed is compared with them."""

    now: float
    events: Sequence[ev.Event]
    actions: Sequence[Any]
    wake_at: float | None


class Encoder:
    """Turns values into JSON. Remembers which requests were written in full."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def named(self, values: Iterable[Any]) -> list[Any]:
        """Events or actions."""
        return [[type(value).__name__, self._fields(value)] for value in values]

    def _fields(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kind: Any = type(value)
        for name, default in _defaults(kind).items():
            held = getattr(value, name)
            if held is not default and held != default:
                found[name] = self._value(held)
        return found

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value.value if isinstance(value, Enum) else value
        if isinstance(value, Request):
            if value.id in self._known:
                return value.id
            self._known.add(value.id)
        if hasattr(value, "_fields") or is_dataclass(value):
            return self._fields(value)
        if isinstance(value, Mapping):
            return {key: self._value(each) for key, each in value.items()}
        values = [self._value(each) for each in value]
        return sorted(values) if isinstance(value, frozenset | set) else values


class EventDecoder:
    """The inverse, for events: by the annotations of each type's fields."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def events(self, raw: Iterable[Sequence[Any]]) -> list[ev.Event]:
        """Raises KeyError or TypeError for anything but events."""
        return [self._built(_EVENTS[name], values) for name, values in raw]

    def _built(self, kind: Any, raw: Any) -> Any:
        if kind is Request and isinstance(raw, str):
            return self._requests[raw]
        hints = _hints(kind)
        made = kind(**{name: self._value(hints[name], value) for name, value in raw.items()})
        if kind is Request:
            self._requests[made.id] = made
        return made

    def _value(self, hint: Any, raw: Any) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            (kind,) = (each for each in inner if each is not type(None)) if len(inner) == 2 else (None,)
            return None if raw is None else raw if kind is None else self._value(kind, raw)
        if origin is tuple:
            return tuple(self._value(inner[0], each) for each in raw)
        if origin is frozenset:
            return frozenset(raw)
        if origin is not None or hint is Any or hint in (str, int, float, bool):
            return raw if origin in (None, Literal, dict) else dict(raw)
        return hint(raw) if issubclass(hint, Enum) else self._built(hint, raw)


class EventRecorder:
    """Lines of a log, one for each call of `handle`. `encode` the events before the call, which may change requests."""

    def __init__(self) -> None:
        self._encoder = Encoder()

    def header(self, policy: str, overrides: Mapping[str, Any]) -> str:
        return json.dumps({"log": KIND, "version": VERSION, "policy": policy, "overrides": overrides})

    def events(self, events: Sequence[ev.Event]) -> list[Any]:
        return self._encoder.named(events)

    def actions(self, reply: ev.Reply) -> list[Any]:
        return self._encoder.named(reply.actions)

    def line(self, now: float, events: Sequence[Any], reply: ev.Reply) -> str:
        """`events` as this recorder has encoded them."""
        batch = {"now": now, "events": events, "actions": self.actions(reply), "wake_at": reply.wake_at}
        return json.dumps(batch, separators=(",", ":"))


class Log:
    """A log as read from a file. Raises ConfigError if `lines` are not one."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        raw = self._json(next(self._lines, ""), 1)
        if not isinstance(raw, dict) or raw.get("log") != KIND or raw.get("version") != VERSION:
            raise ConfigError(f"this is no {KIND} of version {VERSION}", field="log")
        self.header = Header(str(raw["policy"]), raw["overrides"])

    def batches(self) -> Iterator[LoggedBatch]:
        decoder = EventDecoder()
        for number, line in enumerate(self._lines, 2):
            raw = self._json(line, number)
            try:
                yield LoggedBatch(raw["now"], decoder.events(raw["events"]), raw["actions"], raw["wake_at"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"line {number} of the log cannot be read: {error!r}", field="log") from None

    @staticmethod
    def _json(line: str, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            raise ConfigError(f"line {number} of the log is not JSON", field="log") from None


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """The default of each field; without one, a value that equals nothing."""
    if is_dataclass(kind):
        return {each.name: MISSING if each.default is MISSING else each.default for each in fields(kind)}
    return {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
