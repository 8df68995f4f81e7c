"""Client of the `/weights` endpoint of reference engines: reads the state of weights and orders a load. Synchronous,
for tasks; every call is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from controller.core.errors import SlacklineError
from workers.actions.fleet_calls import call_fleet
from workers.http import outbound
from workers.http.engine_keys import NO_KEY, EngineKey
from workers.http.fleet_proof import NoChallenge

CALL_S = 2.0


class EngineAway(SlacklineError):
    """The engine did not respond, or its answer could not be read. It may respond later."""


class EngineRefuses(SlacklineError):
    """The engine refused. `busy`: because it is already loading or moving weights."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """`order`: the name of the newest load; `attempts`: of that load; `present_s`: seconds since it succeeded;
    `held_s`: for how long it was held on a shared link so far."""

    state: str  # present | loading | absent
    order: str = ""
    bytes: int = 0
    host_copy: bool = False
    attempts: Sequence[Mapping[str, Any]] = ()
    present_s: float | None = None
    held_s: float = 0.0


class WeightsClient:
    """The client of one engine."""

    def __init__(self, url: str, token: str, key: EngineKey = NO_KEY) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._key = key

    def look(self) -> EngineWeights:
        """Raises EngineAway, EngineRefuses."""
        return _weights(self._call("GET", "/weights"))

    def order_load(self, order: str, sources: Sequence[Mapping[str, str]]) -> EngineWeights:
        """Start a load, which continues by itself. Raises EngineAway (the load may have started), EngineRefuses."""
        body = {"background": True, "order": order, "sources": list(sources)}
        return _weights(self._call("POST", "/weights/load", body))

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            if body is None:
                answer = outbound.request(method, self._url + path, headers=self._key.headers(), timeout=CALL_S)
            else:
                answer = call_fleet(method, self._url, path, self._token, body=body, timeout=CALL_S, key=self._key)
            said = answer.json()
        except (requests.RequestException, NoChallenge, ValueError) as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}{path}") from error
        if not isinstance(said, dict):
            raise EngineAway(f"no JSON object at {self._url}{path}")
        if not answer.ok:
            raise EngineRefuses(_message(said, answer.status_code), busy=answer.status_code == 409)
        return said


def _weights(said: Mapping[str, Any]) -> EngineWeights:
    try:
        attempts = [dict(each) for each in said.get("attempts", [])]
        present_s = said.get("present_s")
        return EngineWeights(
            str(said["state"]),
            str(said.get("order", "")),
            int(said["bytes"]),
            bool(said.get("host_copy")),
            attempts,
            None if present_s is None else float(present_s),
            float(said.get("held_s", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAway(f"unreadable answer about weights: {error!r}") from error


def _message(said: Mapping[str, Any], status: int) -> str:
    error = said.get("error")
    told = error.get("message") if isinstance(error, dict) else said.get("detail")
    return f"status {status}: {told or 'no reason given'}"
