"""Registered endpoints that Slackline does not run (vLLM or SGLang servers, compose services): it only observes
them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import requests

from controller.core.errors import ConfigError
from controller.models import Instance
from controller.models.fleet import KvRole, Weights
from controller.scale.provisioning import STATIC
from workers.actions import sleep_client
from workers.actions.instance_keys import key_of
from workers.actions.parallel_calls import LoopCalls
from workers.actions.weights_client import EngineAway
from workers.http import kept_calls
from workers.http.engine_keys import NO_KEY, EngineKey, NoEngineKey
from workers.provisioners.base import PROVISIONERS, Observed, checked_id

log = logging.getLogger(__name__)

UNPROVEN = "No engine of this kind has answered at this URL yet. The log of the worker says what was found."
HEALTH_TIMEOUT_S = 1.0
INFO_TIMEOUT_S = 5.0  # SGLang asks its scheduler for the answer
ASK_S = 1.5  # for all endpoints together
# SGLang's /health generates a token, and its failure would persist. Gateways see whether it takes requests.
ALIVE = {"sglang": "/model_info"}
USUAL_ALIVE = "/health"
MODES = {"null": "collocated", None: "collocated"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`role` and `kv_role` (of vLLM): as registered, to compare with how the server was started; "": do not compare.
    `asleep`: the version of its row if it sleeps according to the row, to ask the engine whether it still does; None:
    do not ask. `known`: it was ready before, so an engine is there, and what is wrong with it may be shown."""

    url: str
    backend: str = "vllm"
    role: str = ""
    kv_role: str = ""
    asleep: int | None = None
    key: EngineKey = NO_KEY
    known: bool = True


class NoAnswer(Exception):
    """It does not answer as a healthy engine; the text says how."""

    def __init__(self, state: str, how: str) -> None:
        super().__init__(how)
        self.state = state


class Watch:
    """The last observation of each endpoint, kept between the runs of one process. An endpoint that answers late keeps
    its last observation until it answers or fails."""

    def __init__(self, calls: LoopCalls | None = None) -> None:
        self._asker = calls or LoopCalls()
        self._seen: dict[tuple[str, str], Observed] = {}

    def look(self, endpoints: Mapping[str, Endpoint]) -> list[Observed]:
        """Observe all endpoints in parallel, so that many unreachable ones take no longer than one."""
        asked = {(id, each.url): partial(_look, id, each) for id, each in endpoints.items()}
        self._seen = {key: seen for key, seen in self._seen.items() if key in asked}
        for key, answer in self._asker.ask(asked, ASK_S).items():
            error = answer.exception()
            late = NoAnswer("exited", str(error))
            self._seen[key] = answer.result() if error is None else _silent(key[0], endpoints[key[0]], late)
        late = NoAnswer("starting", "the server has not responded yet")
        return [self._seen.get((id, url)) or _silent(id, endpoints[id], late) for id, url in asked]


WATCH = Watch()  # kept between rounds: an endpoint that hangs is not asked again until its call has ended


@PROVISIONERS.register(STATIC)
class StaticProvisioner:
    """`endpoints`: base URL or Endpoint by instance id. `start` and `stop` only change this list."""

    def __init__(self, endpoints: Mapping[str, str | Endpoint], watch: Watch | None = None) -> None:
        self.endpoints = {id: Endpoint(each) if isinstance(each, str) else each for id, each in endpoints.items()}
        self._watch = watch or Watch()

    @classmethod
    def here(cls, data_dir: Path) -> StaticProvisioner:
        """With the registered endpoints of the database."""
        return cls(registered_endpoints(), WATCH)

    def observe(self) -> list[Observed]:
        return self._watch.look(self.endpoints)

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        url = spec.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"instance {id}: a static instance needs its url (http://...)", "url")
        self.endpoints[checked_id(id)] = Endpoint(url)

    def stop(self, id: str, grace_s: float) -> None:
        """Remove it from the list. Its server is not ours to stop, and its drain has ended already."""
        self.endpoints.pop(id, None)

    def log(self, id: str) -> None:
        """It is where the endpoint runs."""


def registered_endpoints() -> dict[str, Endpoint]:
    """The registered endpoints. Their role is compared with the engine's only when they join, since it may be switching
    later; a sleeping one is asked whether it still sleeps."""
    rows = Instance.objects.live().filter(provisioner=STATIC).exclude(url="")
    return {row.pk: _endpoint(row) for row in rows}


def _endpoint(row: Instance) -> Endpoint:
    asleep = row.version if row.weights == Weights.ASLEEP else None
    if row.observed_state == Instance.Observed.READY:
        return Endpoint(row.url, row.backend, asleep=asleep, key=key_of(row))
    known = row.ready_at is not None
    return Endpoint(row.url, row.backend, row.role, row.kv_role, asleep, key_of(row), known)


async def _look(id: str, endpoint: Endpoint) -> Observed:
    try:
        return await _asked(id, endpoint)
    except NoAnswer as silent:
        return _silent(id, endpoint, silent)


def _silent(id: str, endpoint: Endpoint, silent: NoAnswer) -> Observed:
    """What was found of one that was never ready is for the log alone: whoever may register a URL could otherwise read
    from the page which ports and paths of our network answer."""
    if endpoint.known:
        return Observed(id, silent.state, endpoint.url, error=str(silent))
    _log_once(id, endpoint.url, str(silent))
    return Observed(id, "exited", endpoint.url, error=UNPROVEN)


@lru_cache(maxsize=1024)
def _log_once(id: str, url: str, how: str) -> None:
    log.warning("instance %s: %s", id, how)


async def _asked(id: str, endpoint: Endpoint) -> Observed:
    """Raises NoAnswer."""
    url, path = endpoint.url, ALIVE.get(endpoint.backend, USUAL_ALIVE)
    try:
        told = endpoint.key.headers()
        answer = await kept_calls.get(f"{url.rstrip('/')}{path}", headers=told, timeout_s=HEALTH_TIMEOUT_S)
    except NoEngineKey as error:
        return Observed(id, "exited", url, error=str(error))
    except requests.RequestException as error:
        raise NoAnswer("exited", f"{type(error).__name__} at {url}{path}") from error
    if answer.status_code != 200:
        raise NoAnswer("starting", f"status {answer.status_code} at {url}{path}")
    wrong = ""
    if endpoint.backend == "sglang" and endpoint.role:
        wrong = await _other_role(endpoint)
    elif endpoint.kv_role:
        wrong = await _other_kv_role(endpoint)
    awake = endpoint.asleep if endpoint.asleep is not None and await _awake(endpoint) else None
    return Observed(id, "starting" if wrong else "ready", url, error=wrong, awake=awake)


async def _awake(endpoint: Endpoint) -> bool:
    """Whether the engine reports that it is awake: SGLang by `/ready`, others by their metrics, since their `/health`
    is 200 in any state."""
    url = endpoint.url.rstrip("/")
    try:
        told = endpoint.key.headers()
        if endpoint.backend == "sglang":
            ready = await kept_calls.get(f"{url}/ready", headers=told, timeout_s=HEALTH_TIMEOUT_S)
            return ready.status_code == 200
        metrics = await kept_calls.get(f"{url}/metrics", headers=told, timeout_s=sleep_client.CALL_S)
        if metrics.status_code != 200:
            return False
        said = sleep_client.parse_state(metrics.text)
    except (requests.RequestException, EngineAway):
        return False
    return said.awake and not said.moving


async def _other_role(endpoint: Endpoint) -> str:
    """The error if the server runs in another role than it is registered with; "" if they agree. Raises NoAnswer."""
    try:
        url, told = f"{endpoint.url.rstrip('/')}/server_info", endpoint.key.headers()
        answer = await kept_calls.get(url, headers=told, timeout_s=INFO_TIMEOUT_S)
        said: Any = answer.json()
        states = said.get("internal_states") or [{}]
        mode = states[0].get("disaggregation_mode") or said.get("disaggregation_mode")
    except (requests.RequestException, ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise NoAnswer("starting", f"{type(error).__name__} at {endpoint.url}/server_info") from error
    if mode not in (None, "null", "prefill", "decode"):
        raise NoAnswer("starting", f"{endpoint.url}/server_info reports an unknown disaggregation_mode")
    role = MODES.get(mode, mode)
    if role == endpoint.role:
        return ""
    return f"the server runs as {role} (disaggregation_mode {mode}) but is registered as {endpoint.role}"


async def _other_kv_role(endpoint: Endpoint) -> str:
    """The error if a vLLM server was started with another `kv_role` than it is registered with; "" if they agree, or if
    the server does not report it because it runs without vLLM's development mode. Raises NoAnswer."""
    try:
        url, told = f"{endpoint.url.rstrip('/')}/server_info?config_format=json", endpoint.key.headers()
        answer = await kept_calls.get(url, headers=told, timeout_s=INFO_TIMEOUT_S)
        if answer.status_code == 404:
            return ""
        transfer = answer.json()["vllm_config"]["kv_transfer_config"] or {}
        started = transfer.get("kv_role")
    except (requests.RequestException, ValueError, AttributeError, KeyError, TypeError) as error:
        raise NoAnswer("starting", f"{type(error).__name__} at {endpoint.url}/server_info") from error
    if started == endpoint.kv_role:
        return ""
    if started not in (None, *KvRole.values):
        raise NoAnswer("starting", f"{endpoint.url}/server_info reports an unknown kv_role")
    return f"the server was started with kv_role {started} but is registered with {endpoint.kv_role}"
