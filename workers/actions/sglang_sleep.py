"""The sleep client for SGLang, with the interface of `workers.actions.sleep_client`, so that one state machine serves
both engines.

A sleeping SGLang server is a paused one whose memory an action of ours released. `/ready` is the same for any paused or
unhealthy server, so what was released is stored with the actions (`workers.actions.sglang_memory`). The sleep level
follows from its start: with `--enable-weights-cpu-backup` a copy of the weights stays in host memory (1), without it
none does (2).
"""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import orjson
import requests
from urllib3.exceptions import NewConnectionError

from controller.models import Action
from workers.actions.sglang_memory import RELEASED, RELEASING, RESUMING, TAGS, Memory, MemoryNotes
from workers.actions.sleep_client import CALL_S, RELOAD_S, EngineBroke, NoSleepMode, SleepClient, SleepState
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.backends.base import EngineError
from workers.backends.sglang_state import ServerInfo, parse_info, parse_loads
from workers.http import outbound

INFO_S = 4.0  # the server asks its scheduler for the answer
KEEPS_WEIGHTS = "enable_weights_cpu_backup"
HEALTH_S = 3.0  # the server generates a token; one that takes longer continues there


PARTS = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}  # SGLang's tags for those of a wake-up
OPEN = "it is unknown whether its memory was released or resumed (a worker died during the call): restart the server"
SERVES = "the server is ready although its memory was released (it was continued from elsewhere): restart the server"
FOREIGN = "the server is not ready, and no action put it to sleep: it is paused by its owner, starting or unhealthy"


class SglangSleepClient(SleepClient):
    """The client of one server. Every method may raise EngineAway and EngineRefuses; those that store notes also raise
    NotOurs."""

    def bind(self, action: Action) -> None:
        self._notes = MemoryNotes(action)

    def look(self) -> SleepState:
        """What the server reports; `recall` adds what was released."""
        asked_at, info = time.time(), self._info()
        try:
            load = parse_loads(self._get("/v1/loads?include=core,disagg", CALL_S).content, 0.0, info.role)
        except EngineError as error:
            raise EngineAway(str(error)) from error
        ready = self._get("/ready", CALL_S, (200, 503)).status_code == 200
        level, requests_there = 1 if info.on(KEEPS_WEIGHTS) else 2, load.running + load.waiting
        return SleepState(ready, level, requests=requests_there, boot=_boot(info), asked_at=asked_at)

    def recall(self, said: SleepState) -> SleepState:
        """The state with what the notes add. The server is asleep if an action of ours released its memory, none
        resumed it, and the same process still runs."""
        memory = self._notes.see(said.boot, said.asked_at)
        if said.boot == memory.boot and said.asked_at <= memory.at:
            return replace(said, level=0, moving=True)  # the look began before the last call
        if said.awake:
            return replace(said, level=0, unknown=SERVES if memory.tags else "")
        if memory.open:
            return replace(said, level=0, unknown=OPEN)
        if memory.asleep:
            return said
        ours = memory.paused or memory.tags or self._notes.woken
        return replace(said, level=0, not_ready="" if ours else FOREIGN)

    def check_able(self, level: int) -> None:
        """Raises NoSleepMode unless its memory saver is on, and keeps a copy of the weights (level 1) or none (2)."""
        info = self._info()
        if not info.on("enable_memory_saver"):
            raise NoSleepMode("SGLang cannot sleep because it was started without --enable-memory-saver")
        if (level == 1) != info.on(KEEPS_WEIGHTS):
            was = "with" if info.on(KEEPS_WEIGHTS) else "without"
            raise NoSleepMode(
                f"SGLang cannot sleep at level {level} because it was started {was} a copy of its weights"
            )

    def sleep(self, level: int) -> None:
        """Pause, which aborts requests in flight, then release. A release while requests run would end the server."""
        self.check_able(level)
        self._put(paused=True)
        self._call("/pause_generation", {}, {"mode": "abort"}, CALL_S)
        try:
            self._move("/release_memory_occupation", TAGS, RELEASING)
        except EngineBroke:
            raise
        except EngineRefuses:
            self._serve()
            raise

    def wake(self, *tags: str) -> None:
        """Resume the released parts of the tags. It stays paused if only the weights were asked for, or while other
        parts are still released."""
        wanted = [part for tag in tags or tuple(PARTS) for part in PARTS[tag]]
        released = tuple(part for part in wanted if self._notes.memory.tags.get(part) == RELEASED)
        if released:
            self._move("/resume_memory_occupation", released, RESUMING)
        if tags != ("weights",) and not self._notes.memory.tags:
            self._serve()

    def whole(self) -> None:
        if self._notes.memory.tags or self._notes.memory.paused:
            self._notes.put(Memory(self._notes.memory.boot))

    def unpause(self) -> bool:
        memory = self._notes.memory
        if not memory.paused or memory.tags:
            return False
        self._serve()
        return True

    def reload(self) -> None:
        """Read the weights again from the model's path. This also drops the prefix cache."""
        path = self._info().arguments.get("model_path")
        body = {"model_path": path, "abort_all_requests": False, "flush_cache": True}
        said = self._call("/update_weights_from_disk", {}, body, RELOAD_S)
        if not said.get("success"):
            raise EngineRefuses(f"the weights could not be loaded: {said.get('message', 'no reason given')}")

    def reset_prefix_cache(self) -> bool:
        return True  # `reload` did it

    def _serve(self) -> None:
        """Continue to serve. A `/health` follows, since a health probe that failed during the sleep would otherwise
        keep the server unready."""
        self._call("/continue_generation", {}, {"torch_empty_cache": True}, CALL_S)
        try:
            self._get("/health", HEALTH_S)
        except EngineAway as error:
            if not isinstance(error.__cause__, requests.ReadTimeout):
                raise
        self._put(paused=False)

    def _move(self, path: str, tags: tuple[str, ...], state: str) -> None:
        """Release or resume these tags. Noted before the call, and again once its result is known."""
        before = self._notes.memory.tags
        self._put(tags={**before, **dict.fromkeys(tags, state)})
        try:
            self._call(path, {}, {"tags": list(tags)}, CALL_S)
        except EngineBroke:
            raise
        except EngineRefuses:
            self._put(tags=before)
            raise
        except EngineAway as error:
            if isinstance(error.__cause__, requests.ReadTimeout):  # the server continues with it
                self._put(sent=True)
                return
            if _never_sent(error.__cause__):
                self._put(tags=before)
            raise
        self._notes.put(self._notes.memory.done())

    def _put(self, **changes: Any) -> None:
        self._notes.put(replace(self._notes.memory, **changes))

    def _info(self) -> ServerInfo:
        try:
            return parse_info(self._get("/server_info", INFO_S).content)
        except EngineError as error:
            raise EngineAway(str(error)) from error

    def _get(self, path: str, limit_s: float, fine: tuple[int, ...] = (200,)) -> requests.Response:
        try:
            answer = outbound.get(self._url + path, headers=self._key.headers(), timeout=(CALL_S, limit_s))
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}{path}") from error
        if answer.status_code not in fine:
            raise EngineAway(f"status {answer.status_code} at {self._url}{path}")
        return answer


def _boot(info: ServerInfo) -> str:
    """An identity of the server process: a hash of its random seed and of the durations of its start."""
    told = [info.arguments.get("random_seed"), info.arguments.get("startup_time")]
    return blake2b(orjson.dumps(told, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def _never_sent(error: BaseException | None) -> bool:
    """Whether the call failed before there was a connection."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    inner = error.args[0] if isinstance(error, requests.ConnectionError) and error.args else None
    return isinstance(getattr(inner, "reason", None), NewConnectionError)
