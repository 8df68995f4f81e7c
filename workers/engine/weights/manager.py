"""The state of an engine's weights (present, loading, absent), their loads from sources, and each attempt.

A source is the memory of another engine, a copy in this host's memory, or the disk; sources are tried in the given
order. An engine serves only while its weights are present and complete. An engine without weights is asleep, like vLLM
at sleep level 2.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import aiohttp

from controller.core.errors import SlacklineError
from workers.engine.weights.checkpoint_identity import ANY
from workers.engine.weights.peer_calls import call_fleet
from workers.engine.weights.turns import LoadTurn
from workers.http.fleet_proof import NoChallenge

KINDS = ("engine", "host", "disk")
log = logging.getLogger("workers.engine")
ASK_S = 5.0


class LoadFailed(SlacklineError):
    """The source did not provide complete weights."""


class Digesting(LoadFailed):
    """The weights cannot be sent yet, since their digests are being computed; `nbytes` are done. Call again later."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes of the weights have been digested")
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class Source:
    """A source of weights. `kind`: one of KINDS; `url`: of the engine, for kind `engine`."""

    kind: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies weights: the served model name, and the identity of the checkpoint (`checkpoint_identity`; "" if
    unknown). Both must agree for a transfer, since many checkpoints have the same names and shapes."""

    model: str
    checkpoint: str = ""

    def __str__(self) -> str:
        whole, _, config = self.checkpoint.partition(ANY)
        return f"{self.model} (checkpoint {whole[:12] or (f'any with config.json {config}' if config else 'unknown')})"

    def meets(self, wanted: Identity) -> bool:
        """Whether these weights may be sent to an engine that requests `wanted`, which may be any checkpoint with the
        same config.json. Weights of an unknown checkpoint are never sent."""
        if not self.checkpoint or self.model != wanted.model:
            return False
        any_such = wanted.checkpoint.startswith(ANY) and self.checkpoint.endswith(wanted.checkpoint)
        return any_such or self.checkpoint == wanted.checkpoint


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to load from a source. `error`: "" if it succeeded. `flow`, `held_s`, `level`: as in LoadTurn;
    `held_s` is a part of `seconds`."""

    kind: str
    url: str
    seconds: float
    bytes: int
    error: str
    flow: str = ""
    held_s: float = 0.0
    level: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class WeightStore(Protocol):
    """The weights of an executor. Calls may take seconds and do not block the event loop."""

    @property
    def present(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def identity(self) -> Identity:
        """The identity of the present weights; without a checkpoint while there are none."""
        ...

    @property
    def has_host_copy(self) -> bool:
        """Whether this engine kept a copy when it fell asleep."""
        ...

    @property
    def shared_copy(self) -> bool:
        """Whether the engines of this host share a copy that this engine can read."""
        ...

    @property
    def sending(self) -> bool:
        """Whether another engine is reading them, or they are being copied for others."""
        ...

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        """Load from the source; returns the bytes read. `turn` is kept up to date. Raises LoadFailed; then no weights
        are present."""
        ...

    async def release(self, keep_host_copy: bool) -> None:
        """Release the weights. Raises LoadFailed if no copy could be kept; `present` then tells whether they are still
        there."""
        ...

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        """Begin to send to the engine that waits at this address with this nonce; returns the manifest of the tensors.
        Raises LoadFailed, Digesting."""
        ...


Own = TypeVar("Own", bound=WeightStore)


class StoreWrapper(Generic[Own]):
    """A store that wraps another one; its properties are those of the wrapped store unless overridden."""

    def __init__(self, own: Own) -> None:
        self._own = own

    @property
    def present(self) -> bool:
        return self._own.present

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    @property
    def identity(self) -> Identity:
        return self._own.identity

    @property
    def has_host_copy(self) -> bool:
        return self._own.has_host_copy

    @property
    def shared_copy(self) -> bool:
        return self._own.shared_copy

    @property
    def sending(self) -> bool:
        return self._own.sending


class WeightManager:
    """Manages the weights of an engine, one load at a time."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.loading = self._releasing = False
        self.order = ""  # the caller's name of the newest load
        self.attempts: list[Attempt] = []  # of the newest load
        self._turn = LoadTurn()  # of the newest attempt
        self._loaded_at: float | None = None  # monotonic seconds at which the newest load succeeded

    @property
    def present_s(self) -> float | None:
        """Seconds since a load succeeded; None if none did, or if the weights are gone."""
        return time.monotonic() - self._loaded_at if self._loaded_at is not None and self.state == "present" else None

    @property
    def state(self) -> str:
        if self.loading:
            return "loading"
        return "present" if self.store.present else "absent"

    @property
    def busy(self) -> bool:
        """Whether weights are being loaded or released, so that nothing else may begin."""
        return self.loading or self._releasing

    def claim(self, order: str) -> bool:
        """Reserve the next load; the caller then runs `load`. False: the weights are already present."""
        if self.store.present:
            return False
        self.loading, self.order, self.attempts = True, order, []
        return True

    async def load(self, sources: Sequence[Source], order: str = "") -> bool:
        """Load from the first source that succeeds; `attempts` has each try. True if the weights are present, also if
        they were before."""
        if not self.loading and not self.claim(order):
            return True
        try:
            for source in sources:
                if await self._try(source):
                    self._loaded_at = time.monotonic()
                    return True
            return False
        finally:
            self.loading = False

    async def release(self, keep_host_copy: bool) -> None:
        """Release the weights. Raises LoadFailed if no copy could be kept, and while they are loaded or sent, since
        their memory is in use then."""
        if self.busy or self.store.sending:
            raise LoadFailed("weights are being loaded or sent")
        self._releasing = True
        try:
            await self.store.release(keep_host_copy)
        finally:
            self._releasing = False

    @property
    def held_s(self) -> float:
        """Seconds in which the newest load was held so far, on a shared link."""
        return sum(each.held_s for each in self.attempts) + (self._turn.held_s if self.loading else 0.0)

    async def _try(self, source: Source) -> bool:
        began, moved, error = time.monotonic(), 0, ""
        self._turn = turn = LoadTurn()
        try:
            moved = await self.store.load(source, turn)
        except LoadFailed as failure:
            error = str(failure)
        except Exception as failure:  # whatever the error is, the next source is tried
            log.exception("weight load from %s failed", source)
            error = f"{type(failure).__name__}: {failure}"[:500] or "no reason given"
        seconds = time.monotonic() - began
        self._turn = LoadTurn()
        self.attempts.append(
            Attempt(source.kind, source.url, seconds, moved, error, turn.flow, turn.held_s, turn.level)
        )
        return not error


class EmulatedWeights:
    """Weights of the emulated executor: no data moves, and a load takes the configured time of its source.

    An engine is a valid source only if it has the weights of this model before and after that time.
    """

    sending = shared_copy = False

    def __init__(self, load_s: Mapping[str, float], nbytes: int, *, present: bool, model: str, token: str = "") -> None:
        self.present = present
        self.identity = Identity(model)
        self.nbytes = nbytes
        self.has_host_copy = False
        self._load_s = dict(load_s)
        self._token = token

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        if source.kind == "host" and not self.has_host_copy:
            raise LoadFailed("there is no copy in host memory")
        if source.kind == "engine":
            await _check_whole(source.url, self.identity.model, self._token)
        await asyncio.sleep(self._load_s[source.kind])
        if source.kind == "engine":
            await _check_whole(source.url, self.identity.model, self._token)
        self.present = True
        return self.nbytes

    async def release(self, keep_host_copy: bool) -> None:
        self.has_host_copy = keep_host_copy and (self.present or self.has_host_copy)
        self.present = False

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        raise LoadFailed("emulated weights cannot be sent")


async def _check_whole(url: str, model: str, token: str) -> None:
    """Raises LoadFailed unless the engine there serves this model and has its weights."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
            async with await call_fleet(session, url, "GET", "/weights", None, token) as said:
                told = await said.json() if said.status == 200 else {"state": f"status {said.status}"}
            state, theirs = told.get("state"), told.get("model")
    except NoChallenge as error:
        raise LoadFailed(str(error)) from error
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError) as error:
        raise LoadFailed(f"{url} could not be queried for weights: {type(error).__name__}") from error
    if state != "present":
        raise LoadFailed(f"{url} has no complete weights: {state}")
    if theirs != model:
        raise LoadFailed(f"{url} serves {theirs or 'an unnamed model'} instead of {model}")
