"""Talks vLLM's sleep dialect to an engine: asks how awake it is, has it sleep, wake up, read its weights again.

Synchronous, for tasks. A call that is not answered in time goes on in the engine, so it counts as told: what became of
it shows in the engine's metrics. Only `reload` is waited for, since no metric says whether it went well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests

from workers.actions.weights_client import EngineAway, EngineRefuses

if TYPE_CHECKING:  # it talks to engines where there is no database too
    from controller.models import Action

CALL_S = 2.0
RELOAD_S = 900.0  # the longest read from a disk that is waited for
INFO_S = 4.0  # the first one gathers what is installed there
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LEVELS = {"weights_offloaded": 1, "discard_all": 2}
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class NoSleepMode(EngineRefuses):
    """It would not sleep, whatever it answered: the verb does not exist there, or does nothing."""


class EngineBroke(EngineRefuses):
    """It failed over a call: what became of that is not known."""


class NotOurs(Exception):
    """The order is somebody else's by now, or has ended."""


@dataclass(frozen=True, slots=True)
class SleepState:
    """`awake`: everything is resident. `level`: of its sleep, 0 when it does not say. `moving`: a sleep or a wake-up is
    under way. `requests`: running and waiting there, whoever sent them.

    Of an engine that does not tell what it gave back: `boot`, which of its processes it was, `asked_at`, how old what
    it said is at most; and what is known from elsewhere: `unknown`, why it may not be told anything, `not_ready`, why
    it takes no requests though nobody here put it to sleep."""

    awake: bool
    level: int = 0
    moving: bool = False
    requests: int = 0
    boot: str = ""
    asked_at: float = 0.0
    unknown: str = ""
    not_ready: str = ""


class SleepClient:
    """Of one engine. Every method may raise EngineAway and EngineRefuses, those that note something NotOurs too."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def bind(self, action: Action) -> None:
        """The order that it is told for: where a client keeps what its engine does not tell."""

    def recall(self, said: SleepState) -> SleepState:
        """What it said, in the light of what is kept."""
        return said

    def whole(self) -> None:
        """It serves: whatever was given back has come again."""

    def unpause(self) -> bool:
        """Undo what a sleep that came to nothing began; False: there is nothing to undo."""
        return False

    def look(self) -> SleepState:
        """From `/metrics`: `/is_sleeping` says yes of a merely paused engine too, and `/health` is 200 in any state."""
        try:
            answer = requests.get(f"{self._url}/metrics", timeout=CALL_S)
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}/metrics") from error
        if not answer.ok:
            raise EngineAway(f"status {answer.status_code} at {self._url}/metrics")
        return parse_state(answer.text)

    def check_able(self, level: int) -> None:
        """Raises NoSleepMode where the server was started without sleep mode.

        Such a one answers `/sleep` with 200 and says that it sleeps, in its gauge too, but is paused and keeps its
        memory: a vLLM 0.32 on CPUs does. Only how it was started tells it (`/server_info`, of its development mode).
        """
        try:
            answer = requests.get(f"{self._url}/server_info", params={"config_format": "json"}, timeout=INFO_S)
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}/server_info") from error
        if answer.status_code == 404:
            raise _no_dev_mode("/server_info")
        if not answer.ok:
            raise EngineAway(f"status {answer.status_code} at {self._url}/server_info")
        on = _sleep_mode(answer)
        if on is None:
            raise EngineRefuses("its /server_info does not say whether sleep mode is on")
        if not on:
            raise NoSleepMode(
                "it was started without --enable-sleep-mode: it would say that it sleeps and keep its memory"
            )

    def sleep(self, level: int) -> None:
        """What still runs there is aborted, KV cache and prefix cache are lost."""
        self._tell("/sleep", {"level": level, "mode": "abort"})

    def wake(self, *tags: str) -> None:
        """Without tags all of it. A tag that is not asleep changes nothing."""
        self._tell("/wake_up", {"tags": list(tags)} if tags else {})

    def reload(self) -> None:
        """Returns when the weights have been read again; only then the answer says whether they were."""
        self._call("/collective_rpc", {}, {"method": "reload_weights"}, RELOAD_S)

    def reset_prefix_cache(self) -> bool:
        """False: blocks are still held."""
        return self._call("/reset_prefix_cache", {}, None, CALL_S).get("success") is not False

    def _tell(self, path: str, query: Mapping[str, Any]) -> None:
        try:
            self._call(path, query, None, CALL_S)
        except EngineAway as error:
            if not isinstance(error.__cause__, requests.ReadTimeout):
                raise

    def _call(
        self, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        try:
            answer = requests.post(self._url + path, params=query, json=body, timeout=(CALL_S, timeout_s))
        except requests.RequestException as error:
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


class ReferenceSleepClient(SleepClient):
    """Of a reference engine: the same verbs, with the fleet's token, which no other engine is ever sent."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url)
        self._token = token

    def _call(
        self, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        return super()._call(path, query, {**(body or {}), "token": self._token}, timeout_s)

    def check_able(self, level: int) -> None:
        """Every one is: what it says of its sleep is what it did with its memory."""


def _no_dev_mode(path: str) -> NoSleepMode:
    return NoSleepMode(f"status 404 at {path}: start the server with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode")


def _sleep_mode(answer: requests.Response) -> bool | None:
    """None: it does not say."""
    try:
        on = answer.json()["vllm_config"]["model_config"]["enable_sleep_mode"]
    except (ValueError, KeyError, TypeError):
        return None
    return on if isinstance(on, bool) else None


def parse_state(text: str) -> SleepState:
    """Of a Prometheus page. Data-parallel engines are awake when all are. Raises EngineAway without a sleep state."""
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
        raise EngineAway("the engine's metrics say nothing of its sleep")
    return SleepState(awake, level, moving, waiting)


def _value(line: str) -> float:
    try:
        return float(line.rsplit(" ", 1)[1])
    except (IndexError, ValueError) as error:
        raise EngineAway(f"unreadable metric: {line[:100]}") from error
