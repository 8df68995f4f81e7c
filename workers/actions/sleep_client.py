"""Client of vLLM's sleep endpoints: reads the sleep state, and has an engine sleep, wake up or reload its weights.

Synchronous, for tasks. A call that times out continues in the engine, so it counts as made; the engine's metrics show
its result. Only `reload` waits for its end, since no metric shows whether it succeeded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests

from workers.actions.fleet_calls import call_fleet
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.http import outbound
from workers.http.engine_keys import NO_KEY, EngineKey
from workers.http.fleet_proof import NoChallenge

if TYPE_CHECKING:  # this module is also used in processes without a database
    from controller.models import Action

CALL_S = 2.0
RELOAD_S = 900.0  # the longest read of weights from a disk
INFO_S = 4.0  # the server collects its installed packages for the first answer
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LEVELS = {"weights_offloaded": 1, "discard_all": 2}
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class NoSleepMode(EngineRefuses):
    """The server cannot sleep: the endpoint does not exist there, or does nothing."""


class EngineBroke(EngineRefuses):
    """The server failed during a call (status 5xx), so the result of the call is unknown."""


class NotOurs(Exception):
    """Another worker holds the action now, or it has ended."""


@dataclass(frozen=True, slots=True)
class SleepState:
    """`awake`: everything is resident. `level`: of its sleep; 0 if the engine does not report it. `moving`: a sleep or
    wake-up is in progress. `requests`: running and waiting in the engine, whoever sent them.

    For an engine that does not report what it released (SGLang): `boot` identifies its process, `asked_at` is when the
    look began (epoch seconds). `unknown`: why it must get no calls; `not_ready`: why it takes no requests although no
    action put it to sleep."""

    awake: bool
    level: int = 0
    moving: bool = False
    requests: int = 0
    boot: str = ""
    asked_at: float = 0.0
    unknown: str = ""
    not_ready: str = ""


class SleepClient:
    """The client of one engine. Every method may raise EngineAway and EngineRefuses; those that store notes also raise
    NotOurs."""

    def __init__(self, url: str, key: EngineKey = NO_KEY) -> None:
        self._url = url.rstrip("/")
        self._key = key

    def bind(self, action: Action) -> None:
        """Set the action that the calls belong to, with which a client stores what its engine does not report."""

    def recall(self, said: SleepState) -> SleepState:
        """The reported state, completed with what is stored."""
        return said

    def whole(self) -> None:
        """Store that the engine serves, so all of its memory is resident."""

    def unpause(self) -> bool:
        """Take back the pause of a sleep that failed. False: there is nothing to take back."""
        return False

    def look(self) -> SleepState:
        """Read the sleep state from `/metrics`. `/is_sleeping` is also true for an engine that is only paused, and
        `/health` is 200 in any state."""
        try:
            answer = outbound.get(f"{self._url}/metrics", headers=self._key.headers(), timeout=CALL_S)
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}/metrics") from error
        if not answer.ok:
            raise EngineAway(f"status {answer.status_code} at {self._url}/metrics")
        return parse_state(answer.text)

    def check_able(self, level: int) -> None:
        """Raises NoSleepMode if the server was started without sleep mode.

        Such a server (vLLM 0.32 on CPUs for example) answers `/sleep` with 200 and reports that it sleeps, also in its
        metrics, but it is only paused and keeps its memory. Only its start options tell, from `/server_info` in vLLM's
        development mode.
        """
        try:
            info, wanted = f"{self._url}/server_info", {"config_format": "json"}
            answer = outbound.get(info, params=wanted, headers=self._key.headers(), timeout=INFO_S)
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}/server_info") from error
        if answer.status_code == 404:
            raise _no_dev_mode("/server_info")
        if not answer.ok:
            raise EngineAway(f"status {answer.status_code} at {self._url}/server_info")
        on = _sleep_mode(answer)
        if on is None:
            raise EngineRefuses("/server_info does not report whether sleep mode is on")
        if not on:
            raise NoSleepMode(
                "the server was started without --enable-sleep-mode: it would report that it sleeps and keep its memory"
            )

    def sleep(self, level: int) -> None:
        """Put it to sleep. Requests in flight are aborted; KV cache and prefix cache are lost."""
        self._order("/sleep", {"level": level, "mode": "abort"})

    def wake(self, *tags: str) -> None:
        """Wake the parts named by tags; without tags, all. A tag that is not asleep changes nothing."""
        self._order("/wake_up", {"tags": list(tags)} if tags else {})

    def reload(self) -> None:
        """Read the weights again; returns when that has ended."""
        self._call("/collective_rpc", {}, {"method": "reload_weights"}, RELOAD_S)

    def reset_prefix_cache(self) -> bool:
        """False: some blocks are still in use."""
        return self._call("/reset_prefix_cache", {}, None, CALL_S).get("success") is not False

    def _order(self, path: str, query: Mapping[str, Any]) -> None:
        try:
            self._call(path, query, None, CALL_S)
        except EngineAway as error:
            if not isinstance(error.__cause__, requests.ReadTimeout):
                raise

    def _call(
        self, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        try:
            answer = self._sent(path, query, body, (CALL_S, timeout_s))
        except (requests.RequestException, NoChallenge) as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}{path}") from error
        if answer.status_code == 404:
            raise _no_dev_mode(path)
        if not answer.ok:
            busy = answer.status_code == 409
            kind = EngineBroke if answer.status_code >= 500 else EngineRefuses
            raise kind(f"status {answer.status_code} at {path}: {answer.text[:300]}", busy=busy)
        try:
            said = answer.json()
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}

    def _sent(
        self, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout: tuple[float, float]
    ) -> requests.Response:
        told = self._key.headers()
        return outbound.post(self._url + path, params=query, json=body, headers=told, timeout=timeout)


class ReferenceSleepClient(SleepClient):
    """The client of a reference engine: the same endpoints, with a proof of the fleet's token."""

    def __init__(self, url: str, token: str, key: EngineKey = NO_KEY) -> None:
        super().__init__(url, key)
        self._token = token

    def _sent(
        self, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout: tuple[float, float]
    ) -> requests.Response:
        token, key = self._token, self._key
        return call_fleet("POST", self._url, path, token, body=body, params=query, timeout=timeout, key=key)

    def check_able(self, level: int) -> None:
        """Every reference engine can sleep and reports its state correctly."""


def _no_dev_mode(path: str) -> NoSleepMode:
    return NoSleepMode(f"status 404 at {path}: start the server with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode")


def _sleep_mode(answer: requests.Response) -> bool | None:
    """Whether sleep mode is on; None if the answer does not tell."""
    try:
        on = answer.json()["vllm_config"]["model_config"]["enable_sleep_mode"]
    except (ValueError, KeyError, TypeError):
        return None
    return on if isinstance(on, bool) else None


def parse_state(text: str) -> SleepState:
    """The sleep state in a Prometheus page. Data-parallel engines are awake if all of them are. Raises EngineAway if
    the page has no sleep state."""
    awake, level, moving, waiting = None, 0, False, 0
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name == "vllm:engine_sleep_state":
            state, on = dict(_LABEL.findall(line)).get("sleep_state", ""), _value(line) > 0
            if state == "awake":
                awake = on if awake is None else awake and on
            elif on:
                level = max(level, _LEVELS.get(state, 0))
        elif name == "vllm:sleep_mode_operations_in_flight":
            moving = moving or _value(line) > 0
        elif name in _BUSY:
            waiting += int(_value(line))
    if awake is None:
        raise EngineAway("the engine's metrics have no sleep state")
    return SleepState(awake, level, moving, waiting)


def _value(line: str) -> float:
    try:
        value = float(line.rsplit(" ", 1)[1])
    except (IndexError, ValueError) as error:
        raise EngineAway(f"unreadable metric: {line[:100]}") from error
    if not math.isfinite(value):
        raise EngineAway(f"a metric that is not finite: {line[:100]}")
    return value
