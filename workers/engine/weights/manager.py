"""An engine's weights as others see them: present or absent, where they may come from, and every attempt to get them.

Sources are tried in the order they are given: another engine's memory, a copy in this host's memory, the disk. An
engine serves only while its weights are present and whole; one that has none sleeps, as a vLLM at sleep level 2 does.
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

KINDS = ("engine", "host", "disk")
log = logging.getLogger("workers.engine")
ASK_S = 5.0


class LoadFailed(SlacklineError):
    """This source did not give whole weights."""


class Digesting(LoadFailed):
    """Not yet: the digests of what would be sent are being made, so many bytes of it by now. Whoever asks again later
    finds them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes of the weights have been digested")
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class Source:
    """`url`: of the engine to copy from; `host` and `disk` need none."""

    kind: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose weights: the name they are served by, and which checkpoint they are (`checkpoint_identity`; "" where nobody
    knows). Both must be the same for them to move: many checkpoints have one set of names and shapes."""

    model: str
    checkpoint: str = ""

    def __str__(self) -> str:
        whole, _, config = self.checkpoint.partition(ANY)
        return f"{self.model} (checkpoint {whole[:12] or (f'any with config.json {config}' if config else 'unknown')})"

    def meets(self, wanted: Identity) -> bool:
        """These may be sent to whoever wants those: who has no weights to compare with wants any of its config.json.
        What nobody knows is sent to nobody."""
        if not self.checkpoint or self.model != wanted.model:
            return False
        any_such = wanted.checkpoint.startswith(ANY) and self.checkpoint.endswith(wanted.checkpoint)
        return any_such or self.checkpoint == wanted.checkpoint


@dataclass(frozen=True, slots=True)
class Attempt:
    """`error` is empty for the one that succeeded."""

    kind: str
    url: str
    seconds: float
    bytes: int
    error: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class WeightStore(Protocol):
    """What an executor's weights can do. Calls may take seconds; the loop goes on meanwhile."""

    @property
    def present(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def identity(self) -> Identity:
        """Of what is present; without a checkpoint while nothing is."""
        ...

    @property
    def has_host_copy(self) -> bool:
        """Of its own, kept when it fell asleep."""
        ...

    @property
    def shared_copy(self) -> bool:
        """This host's engines share one that it can read."""
        ...

    @property
    def sending(self) -> bool:
        """Another engine is reading them, or they are copied for others."""
        ...

    async def load(self, source: Source) -> int:
        """Bytes that moved. Raises LoadFailed; then nothing is present."""
        ...

    async def release(self, keep_host_copy: bool) -> None:
        """Raises LoadFailed where no copy could be kept. `present` then says whether they are here still."""
        ...

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        """Begin to send to the engine that waits there with this nonce; the manifest of what comes. Raises
        LoadFailed, Digesting."""
        ...


Own = TypeVar("Own", bound=WeightStore)


class StoreWrapper(Generic[Own]):
    """What a store says that does its work through its `_own`: the same, unless it says otherwise."""

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
    """One load at a time."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.loading = self._releasing = False
        self.order = ""  # whose load the newest one was, as its caller named it
        self.attempts: list[Attempt] = []  # of the newest load
        self._came_at: float | None = None  # monotonic, when a load brought what is here

    @property
    def present_s(self) -> float | None:
        """Seconds since a load brought them; None where none did, or they are gone."""
        return time.monotonic() - self._came_at if self._came_at is not None and self.state == "present" else None

    @property
    def state(self) -> str:
        if self.loading:
            return "loading"
        return "present" if self.store.present else "absent"

    @property
    def busy(self) -> bool:
        """They come or go: nothing else may be begun."""
        return self.loading or self._releasing

    def claim(self, order: str) -> bool:
        """Begin a load, so that no other may: False when the weights are here already. The caller then runs `load`."""
        if self.store.present:
            return False
        self.loading, self.order, self.attempts = True, order, []
        return True

    async def load(self, sources: Sequence[Source], order: str = "") -> bool:
        """True once the weights are here; `attempts` says what was tried. Weights that are here already stay."""
        if not self.loading and not self.claim(order):
            return True
        try:
            for source in sources:
                if await self._try(source):
                    self._came_at = time.monotonic()
                    return True
            return False
        finally:
            self.loading = False

    async def release(self, keep_host_copy: bool) -> None:
        """Raises LoadFailed where no copy could be kept, and while they are loaded or sent: somebody writes or reads
        what this would free."""
        if self.busy or self.store.sending:
            raise LoadFailed("weights are being loaded or sent")
        self._releasing = True
        try:
            await self.store.release(keep_host_copy)
        finally:
            self._releasing = False

    async def _try(self, source: Source) -> bool:
        began, moved, error = time.monotonic(), 0, ""
        try:
            moved = await self.store.load(source)
        except LoadFailed as failure:
            error = str(failure)
        except Exception as failure:  # whatever a source says or does, the next one is tried
            log.exception("weights from %s", source)
            error = f"{type(failure).__name__}: {failure}"[:500] or "no reason given"
        self.attempts.append(Attempt(source.kind, source.url, time.monotonic() - began, moved, error))
        return not error


class EmulatedWeights:
    """Of the emulated executor: nothing is there to move, loading takes the time that is given for its source.

    Another engine must have its weights, of this model, before and after that time, or it is no source.
    """

    sending = shared_copy = False

    def __init__(self, load_s: Mapping[str, float], nbytes: int, *, present: bool, model: str) -> None:
        self.present = present
        self.identity = Identity(model)
        self.nbytes = nbytes
        self.has_host_copy = False
        self._load_s = dict(load_s)

    async def load(self, source: Source) -> int:
        if source.kind == "host" and not self.has_host_copy:
            raise LoadFailed("there is no copy in host memory")
        if source.kind == "engine":
            await _check_whole(source.url, self.identity.model)
        await asyncio.sleep(self._load_s[source.kind])
        if source.kind == "engine":
            await _check_whole(source.url, self.identity.model)
        self.present = True
        return self.nbytes

    async def release(self, keep_host_copy: bool) -> None:
        self.has_host_copy = keep_host_copy and (self.present or self.has_host_copy)
        self.present = False

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        raise LoadFailed("emulated weights cannot be sent")


async def _check_whole(url: str, model: str) -> None:
    """Raises LoadFailed unless the engine there serves this model and has its weights."""
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url.rstrip('/')}/weights") as said:
            told = await said.json() if said.status == 200 else {"state": f"status {said.status}"}
            state, theirs = told.get("state"), told.get("model")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError) as error:
        raise LoadFailed(f"{url} cannot be asked for weights: {type(error).__name__}") from error
    if state != "present":
        raise LoadFailed(f"{url} has no whole weights: {state}")
    if theirs != model:
        raise LoadFailed(f"{url} serves {theirs or 'a model that it does not name'}, {model} is wanted")
