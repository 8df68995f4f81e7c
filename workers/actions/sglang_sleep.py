"""SGLang's memory calls in the verbs of `workers.actions.sleep_client`, so that one state machine puts both to sleep.

A sleeping SGLang is a paused one whose memory was released by an order of ours: `/ready` says of a paused or unhealthy
one the same, so what was released is kept with the orders (`workers.actions.sglang_memory`). Its level is how it was
started: with `--enable-weights-cpu-backup` a copy of the weights stays in host memory (1), without none does (2).
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

INFO_S = 4.0  # it asks the scheduler
KEEPS_WEIGHTS = "enable_weights_cpu_backup"
HEALTH_S = 3.0  # it generates a token; what takes longer goes on there


PARTS = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}  # of a wake-up's tags
OPEN = "whether its memory was released or resumed is not known (a worker was lost over it): start the server again"
SERVES = "it is ready though its memory was released: somebody else continued it, start the server again"
FOREIGN = "it is not ready, and not by an order to sleep: paused by its owner, starting, or unhealthy"


class SglangSleepClient(SleepClient):
    """Of one server. Every method may raise EngineAway and EngineRefuses, those that note something NotOurs too."""

    def bind(self, action: Action) -> None:
        self._notes = MemoryNotes(action)

    def look(self) -> SleepState:
        """What it says itself; what it released is `recall`'s to add."""
        asked_at, info = time.time(), self._info()
        try:
            load = parse_loads(self._get("/v1/loads?include=core,disagg", CALL_S).content, 0.0, info.role)
        except EngineError as error:
            raise EngineAway(str(error)) from error
        ready = self._get("/ready", CALL_S, (200, 503)).status_code == 200
        level, requests_there = 1 if info.on(KEEPS_WEIGHTS) else 2, load.running + load.waiting
        return SleepState(ready, level, requests=requests_there, boot=_boot(info), asked_at=asked_at)

    def recall(self, said: SleepState) -> SleepState:
        """Asleep is what an order of ours released and none resumed, in the process that it is now."""
        memory = self._notes.see(said.boot, said.asked_at)
        if said.boot == memory.boot and said.asked_at <= memory.at:
            return replace(said, level=0, moving=True)  # older than what it was told last
        if said.awake:
            return replace(said, level=0, unknown=SERVES if memory.tags else "")
        if memory.open:
            return replace(said, level=0, unknown=OPEN)
        if memory.asleep:
            return said
        ours = memory.paused or memory.tags or self._notes.woken
        return replace(said, level=0, not_ready="" if ours else FOREIGN)

    def check_able(self, level: int) -> None:
        """Its memory saver is on, and keeps a copy of the weights or none as the level wants."""
        info = self._info()
        if not info.on("enable_memory_saver"):
            raise NoSleepMode("SGLang cannot sleep because it was started without --enable-memory-saver")
        if (level == 1) != info.on(KEEPS_WEIGHTS):
            was = "with" if info.on(KEEPS_WEIGHTS) else "without"
            raise NoSleepMode(
                f"SGLang cannot sleep at level {level} because it was started {was} a copy of its weights"
            )

    def sleep(self, level: int) -> None:
        """Paused first, which ends what still runs: a release while anything does would end the server."""
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
        """What is released of it. Of its weights alone it stays paused, and until all that was asked for is there."""
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
        """From where they came from. The prefix cache goes with them."""
        path = self._info().arguments.get("model_path")
        body = {"model_path": path, "abort_all_requests": False, "flush_cache": True}
        said = self._call("/update_weights_from_disk", {}, body, RELOAD_S)
        if not said.get("success"):
            raise EngineRefuses(f"no weights: {said.get('message', 'no reason given')}")

    def reset_prefix_cache(self) -> bool:
        return True  # the update did

    def _serve(self) -> None:
        """One `/health` after it, or a probe while it slept would keep it from being ready."""
        self._call("/continue_generation", {}, {"torch_empty_cache": True}, CALL_S)
        try:
            self._get("/health", HEALTH_S)
        except EngineAway as error:
            if not isinstance(error.__cause__, requests.ReadTimeout):
                raise
        self._put(paused=False)

    def _move(self, path: str, tags: tuple[str, ...], state: str) -> None:
        """Release or resume these: noted before, and again once it is known what became of it."""
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
            if isinstance(error.__cause__, requests.ReadTimeout):  # it goes on there
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
            answer = requests.get(self._url + path, timeout=(CALL_S, limit_s))
        except requests.RequestException as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}{path}") from error
        if answer.status_code not in fine:
            raise EngineAway(f"status {answer.status_code} at {self._url}{path}")
        return answer


def _boot(info: ServerInfo) -> str:
    """Which process it is: its random seed, unless its owner chose that, and how long each part of its start took."""
    told = [info.arguments.get("random_seed"), info.arguments.get("startup_time")]
    return blake2b(orjson.dumps(told, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def _never_sent(error: BaseException | None) -> bool:
    """There was no connection to send it on."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    inner = error.args[0] if isinstance(error, requests.ConnectionError) and error.args else None
    return isinstance(getattr(inner, "reason", None), NewConnectionError)
