"""The weights of the PyTorch executor for the engine's event loop: long operations run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp

from controller.core.errors import SlacklineError
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.meeting import Meeting, awaited, meet
from workers.engine.torch.weights.transfer import TensorInfo, WeightMemory
from workers.engine.weights.checkpoint_identity import ANY, CheckpointIdentity, UnreadableCheckpoint, marks_of
from workers.engine.weights.host_copy import HostCopy, NoCopy
from workers.engine.weights.manager import Digesting, Identity, LoadFailed, Source
from workers.engine.weights.peer_calls import call_fleet
from workers.engine.weights.turns import LoadTurn, LoadTurns, load_turns
from workers.flowd.client import MEMORY, FlowClient

ASK_S = 10.0  # timeout of a response, and of progress with the digests of a source
HOLD_S = 0.5  # a request waits this long for digests, which suffices for small models
AGAIN_S = 0.05
log = logging.getLogger("workers.engine")


class TorchWeights:
    """`host`: address of this engine for other engines; `timeout_s`: for two engines to form a group; `shared`: the
    copy that the engines of this host share, None: there is none; `model`: the served name. `marks`: of the folder
    before the present weights were read from it (`checkpoint_identity.marks_of`). Reading takes minutes, in which the
    checkpoint may be replaced; without marks the checkpoint of the present weights is unknown. `flows`: whom to ask
    before weights move (None: nobody)."""

    def __init__(
        self,
        memory: WeightMemory,
        folder: Path,
        host: str,
        token: str,
        timeout_s: float,
        shared: HostCopy | None = None,
        *,
        model: str,
        marks: tuple[str, ...] = (),
        flows: FlowClient | None = None,
    ) -> None:
        self.memory = memory
        self._folder = folder
        self._model = model
        self._checkpoint = CheckpointIdentity(folder)
        self._held = self._kept = ""  # identities of the present weights and of the copy kept for a wake-up
        if memory.present:
            self._held = self._identity_since(marks)
        else:  # read the identity in advance, so that a load does not wait for a cold disk
            threading.Thread(target=self._read_identity, daemon=True).start()
        self._host = host
        self._token = token
        self._timeout_s = timeout_s
        self._flows = flows
        self._sends = 0
        self._digesting: Future[list[TensorInfo]] | None = None
        self._shared, self._sharing = shared, False
        if shared is not None and memory.present:  # read at the start
            self._share(shared.at_start)

    @property
    def sending(self) -> bool:
        digesting = self._digesting is not None and not self._digesting.done()
        return self._sends > 0 or self._sharing or digesting

    @property
    def present(self) -> bool:
        return self.memory.present

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def identity(self) -> Identity:
        return Identity(self._model, self._held if self.memory.present else "")

    @property
    def has_host_copy(self) -> bool:
        return self.memory.has_host_copy

    @property
    def shared_copy(self) -> bool:
        return self._shared is not None and self._shared.whole() is not None

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        turn = turn or LoadTurn()
        try:
            if source.kind == "engine":
                return await self._receive(source.url, turn)
            if source.kind == "host":
                return await self._from_host(turn)
            key = self._shared.key() if self._shared is not None else ""
            read = await asyncio.to_thread(self._load_disk)
            self._share(key)
            return read
        except Exception as error:  # a source may return anything
            self.memory.release()
            raise LoadFailed(f"{type(error).__name__}: {error}"[:500]) from error

    def _read_identity(self) -> None:
        with contextlib.suppress(UnreadableCheckpoint):  # reported when it is needed
            self._checkpoint.now()

    def _load_disk(self) -> int:
        marks = marks_of(self._folder)
        read = self.memory.load_disk(self._folder)
        self._held = self._identity_since(marks)
        return read

    def _identity_since(self, marks: tuple[str, ...]) -> str:
        found = self._checkpoint.of(marks)
        if not found:
            log.warning(
                "%s changed or disappeared while it was read: its weights are not sent to engines", self._folder
            )
        return found

    async def _from_host(self, turn: LoadTurn) -> int:
        """Read a copy in this host's memory, whose bandwidth other loads want too."""
        turns = load_turns(self._flows, self.nbytes, f"engine of {self._model}", turn, over=MEMORY)
        try:
            return await asyncio.to_thread(self._load_host, turns)
        finally:
            if turns is not None:
                turns.end()

    def _load_host(self, turns: LoadTurns | None) -> int:
        if self._shared is None or self.memory.has_host_copy:
            read = self.memory.load_host(turns=turns)
            self._held = self._kept
            return read
        try:
            marks = marks_of(self._folder)  # the key of the copy is made of them
            read = self.memory.load_host(self._shared.whole(), turns)
            self._held = self._checkpoint.of(marks)
            return read
        except WeightsError:
            self._shared.discard()  # the next engine that reads the disk writes another one
            raise

    def _share(self, key: str) -> None:
        """Write a copy for other engines, in a thread, of weights read while the checkpoint had this key."""
        if self._shared is not None and not self._sharing:
            self._sharing = True  # keeps the memory from being released meanwhile
            threading.Thread(target=self._write, args=(self._shared, key), daemon=True).start()

    def _write(self, shared: HostCopy, key: str) -> None:
        began = time.monotonic()
        try:
            if shared.whole() is None and shared.write(key, self.memory.entries(), self.memory.blocks()):
                seconds = time.monotonic() - began
                log.info("wrote %.1f MB of weights for this host's engines in %.2f s", self.nbytes / 1e6, seconds)
        except NoCopy as error:
            log.warning("could not write a copy of the weights for this host's engines: %s", error)
        except Exception:
            log.exception("could not write a copy of the weights for this host's engines")
        finally:
            self._sharing = False

    async def _receive(self, url: str, turn: LoadTurn) -> int:
        wants = Identity(self._model, await asyncio.to_thread(self._checkpoint.wanted))
        wanted = {"model": wants.model, "checkpoint": wants.checkpoint}
        async with awaited(self._host, self._token, self._timeout_s) as waiting:
            order = {"host": self._host, "port": waiting.port, "nonce": waiting.nonce, **wanted}
            said = await self._ask(url, order)
            theirs = [TensorInfo(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in said["tensors"]]
            meeting = await waiting.met(ASK_S)
            read = await asyncio.to_thread(self.memory.receive, meeting, theirs, turn)
        self._held = wants.checkpoint
        if wants.checkpoint.startswith(ANY):  # only the source knows the checkpoint
            held = Identity(self._model, str(said.get("checkpoint", "")))
            self._held = held.checkpoint if held.meets(wants) else ""
        return read

    async def _ask(self, url: str, order: Mapping[str, Any]) -> Any:
        """The answer of the source: the tensors that it will send. At its first request a source computes the digests
        of its weights, which takes long for a large model, so it is asked again while it makes progress."""
        best, at = -1, time.monotonic()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
                while True:
                    response = await call_fleet(session, url, "POST", "/weights/send", order, self._token)
                    async with response:
                        if response.status not in (200, 202):
                            raise LoadFailed(f"{url} returned {response.status}: {(await response.text())[:400]}")
                        said = await response.json()
                    if response.status == 200:
                        return said
                    digested, now = min(int(said["digested"]), self.nbytes), time.monotonic()
                    if digested > best:
                        best, at = digested, now
                    elif now - at > ASK_S:
                        raise LoadFailed(f"{url} makes no progress with the digests of its weights: {self._of(best)}")
                    await asyncio.sleep(AGAIN_S)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:  # TimeoutError is one
            if best < 0:
                raise
            gone = f"{url} disappeared while it computed digests ({self._of(best)}): {type(error).__name__}: {error}"
            raise LoadFailed(gone) from error

    def _of(self, digested: int) -> str:
        return f"{digested} of {self.nbytes} bytes"

    async def release(self, keep_host_copy: bool) -> None:
        if not keep_host_copy:
            self.memory.drop_host_copy()
        elif self.memory.present:
            try:
                await asyncio.to_thread(self.memory.keep_host_copy)
                self._kept = self._held
            except (RuntimeError, MemoryError) as error:
                raise LoadFailed(f"no copy could be kept in host memory: {error}"[:500]) from error
        await asyncio.to_thread(self.memory.release)

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        self._sends += 1  # from now on their memory is not released
        try:
            manifest = await self._manifest()
            meeting = await meet(host, port, nonce, self._token, self._host, self._timeout_s)
        except BaseException as error:
            self._sends -= 1
            if isinstance(error, SlacklineError) and not isinstance(error, LoadFailed):
                raise LoadFailed(str(error)) from error
            raise
        # A daemon thread, since a receiver that hangs must not keep the engine from stopping.
        turns = load_turns(self._flows, self.nbytes, host)
        if turns is not None:
            meeting.paces(turns.piece_bytes)
        to = f"{host}:{port}"
        threading.Thread(target=self._send, args=(meeting, to, turns, self._sent(meeting)), daemon=True).start()
        return [list(info) for info in manifest]

    async def _manifest(self) -> list[TensorInfo]:
        """The tensors with their digests. Raises Digesting, WeightsError. Digests are computed at the first request,
        since an engine that is never a source does not need them, and on CPUs they slow down steps."""
        if self._digesting is None or self._digesting.done():  # a finished one may be of weights that are gone
            self._digesting = Future()
            self._digesting.set_running_or_notify_cancel()  # so that a cancelled wait does not cancel it
            threading.Thread(target=self._digest, args=(self._digesting,), daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._digesting), HOLD_S)
        except TimeoutError:
            raise Digesting(self.memory.digested) from None
        except (RuntimeError, MemoryError) as error:
            raise LoadFailed(f"the digests of the weights could not be computed: {error}"[:500]) from error

    def _digest(self, asked: Future[list[TensorInfo]]) -> None:
        """Runs in a daemon thread."""
        try:
            asked.set_result(self.memory.manifest())
        except Exception as error:  # raised in the callers that wait
            asked.set_exception(error)

    def _sent(self, meeting: Meeting) -> Callable[[], object]:
        """A function that the sending thread calls when it is done."""
        loop = asyncio.get_running_loop()

        async def end() -> None:
            self._sends -= 1
            await meeting.close()

        return lambda: asyncio.run_coroutine_threadsafe(end(), loop)

    def _send(self, meeting: Meeting, to: str, turns: LoadTurns | None, sent: Callable[[], object]) -> None:
        try:
            size = self.memory.send(meeting, turns)
            log.info("sent %.1f MB of weights to %s", size / 1e6, to)
        except Exception as error:
            log.warning("could not send weights to %s: %s", to, error)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and so does the engine
                if turns is not None:
                    turns.end()
                sent()
