"""SGLang's memory calls in the verbs of `workers.sleep_client`, so that one state machine puts both to sleep.

A sleeping SGLang is a paused one whose memory was released: `/ready` is the only sign of it. Its level is how it was
started: with `--enable-weights-cpu-backup` a copy of the weights stays in host memory (1), without none does (2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests

from workers.backends.base import EngineError
from workers.backends.sglang_control import KEEPS_WEIGHTS
from workers.backends.sglang_state import ServerInfo, parse_info, parse_loads
from workers.sleep_client import CALL_S, RELOAD_S, NoSleepMode, SleepClient, SleepState
from workers.weights import EngineAway, EngineRefuses

INFO_S = 4.0  # it asks the scheduler
HEALTH_S = 3.0  # it generates a token; what takes longer goes on there


class SglangSleepClient(SleepClient):
    """Of one server. Every method may raise EngineAway and EngineRefuses."""

    def look(self) -> SleepState:
        info = self._info()
        try:
            load = parse_loads(self._get("/v1/loads?include=core,disagg", CALL_S).content, 0.0, info.role)
        except EngineError as error:
            raise EngineAway(str(error)) from error
        awake = self._get("/ready", CALL_S, (200, 503)).status_code == 200
        return SleepState(awake, 1 if info.on(KEEPS_WEIGHTS) else 2, requests=load.running + load.waiting)

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
        self._call("/pause_generation", {}, {"mode": "abort"}, CALL_S)
        try:
            self._tell_it("/release_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]})
        except EngineRefuses:
            self._serve()
            raise

    def wake(self, *tags: str) -> None:
        """Of its weights alone it stays paused."""
        parts = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
        self._tell_it("/resume_memory_occupation", {"tags": [part for tag in tags for part in parts[tag]]})
        if tags != ("weights",):
            self._serve()

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

    def _tell_it(self, path: str, body: Mapping[str, Any]) -> None:
        """What takes longer goes on there; it shows at the next look."""
        try:
            self._call(path, {}, body, CALL_S)
        except EngineAway as error:
            if not isinstance(error.__cause__, requests.ReadTimeout):
                raise

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
