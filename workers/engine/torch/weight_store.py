"""The weights of the PyTorch executor behind the engine's loop: each call in a thread of its own."""

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
from workers.engine.torch.meeting import Meeting, awaited, meet
from workers.engine.torch.transfer import TensorInfo, WeightMemory
from workers.engine.torch.weights import WeightsError
from workers.engine.weights.checkpoint_identity import ANY, CheckpointIdentity, UnreadableCheckpoint, marks_of
from workers.engine.weights.host_copy import HostCopy, NoCopy
from workers.engine.weights.manager import Digesting, Identity, LoadFailed, Source

ASK_S = 10.0  # for an answer, and for a source to get any further with its digests
HOLD_S = 0.5  # an ask is held so long for digests that are being made: many models need no second one
AGAIN_S = 0.05
log = logging.getLogger("workers.engine")


class TorchWeights:
    """`host`: where this engine can be reached by others; `timeout_s`: for two engines to become a group; `shared`: the
    copy that engines of this host share, None: they share none; `model`: the name that they are served by. `marks`: of
    the folder before what is present was read from it (`checkpoint_identity.marks_of`): that took minutes, in which
    another checkpoint may have taken its place. Without them nobody knows which one is present."""

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
    ) -> None:
        self.memory = memory
        self._folder = folder
        self._model = model
        self._checkpoint = CheckpointIdentity(folder)
        self._held = self._kept = ""  # the checkpoint that is present, and that of the copy kept for a wake-up
        if memory.present:
            self._held = self._named(marks)
        else:  # read before it is needed: a load must not wait for a cold disk
            threading.Thread(target=self._foresee, daemon=True).start()
        self._host = host
        self._token = token
        self._timeout_s = timeout_s
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

    async def load(self, source: Source) -> int:
        try:
            if source.kind == "engine":
                return await self._receive(source.url)
            if source.kind == "host":
                return await asyncio.to_thread(self._load_host)
            key = self._shared.key() if self._shared is not None else ""
            read = await asyncio.to_thread(self._load_disk)
            self._share(key)
            return read
        except Exception as error:  # what a source answers may be anything
            self.memory.release()
            raise LoadFailed(f"{type(error).__name__}: {error}"[:500]) from error

    def _foresee(self) -> None:
        with contextlib.suppress(UnreadableCheckpoint):  # said when it is needed
            self._checkpoint.now()

    def _load_disk(self) -> int:
        marks = marks_of(self._folder)
        read = self.memory.load_disk(self._folder)
        self._held = self._named(marks)
        return read

    def _named(self, marks: tuple[str, ...]) -> str:
        found = self._checkpoint.of(marks)
        if not found:
            log.warning("%s was changed or went away while it was read: no engine is given its weights", self._folder)
        return found

    def _load_host(self) -> int:
        if self._shared is None or self.memory.has_host_copy:
            read = self.memory.load_host()
            self._held = self._kept
            return read
        try:
            marks = marks_of(self._folder)  # of which the copy is: its key is made of them
            read = self.memory.load_host(self._shared.whole())
            self._held = self._checkpoint.of(marks)
            return read
        except WeightsError:
            self._shared.discard()  # the next one that reads the disk writes a better one
            raise

    def _share(self, key: str) -> None:
        """What was just read from the disk, while the checkpoint had this key, beside what it serves."""
        if self._shared is not None and not self._sharing:
            self._sharing = True  # until then its memory is not given back
            threading.Thread(target=self._write, args=(self._shared, key), daemon=True).start()

    def _write(self, shared: HostCopy, key: str) -> None:
        began = time.monotonic()
        try:
            if shared.whole() is None and shared.write(key, self.memory.entries(), self.memory.blocks()):
                seconds = time.monotonic() - began
                log.info("wrote %.1f MB of weights for this host's engines in %.2f s", self.nbytes / 1e6, seconds)
        except NoCopy as error:
            log.warning("no copy of the weights for this host's engines: %s", error)
        except Exception:
            log.exception("no copy of the weights for this host's engines")
        finally:
            self._sharing = False

    async def _receive(self, url: str) -> int:
        wants = Identity(self._model, await asyncio.to_thread(self._checkpoint.wanted))
        wanted = {"model": wants.model, "checkpoint": wants.checkpoint}
        async with awaited(self._host, self._token, self._timeout_s) as waiting:
            order = {"token": self._token, "host": self._host, "port": waiting.port, "nonce": waiting.nonce, **wanted}
            said = await self._ask(url, order)
            theirs = [TensorInfo(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in said["tensors"]]
            meeting = await waiting.met(ASK_S)
            read = await asyncio.to_thread(self.memory.receive, meeting, theirs)
        self._held = wants.checkpoint
        if wants.checkpoint.startswith(ANY):  # only the source knows which one it was
            held = Identity(self._model, str(said.get("checkpoint", "")))
            self._held = held.checkpoint if held.meets(wants) else ""
        return read

    async def _ask(self, url: str, order: Mapping[str, Any]) -> Any:
        """What will come from there. A source whose weights nobody asked for yet digests them first, which takes longer
        the larger they are: it is asked again as long as it gets on."""
        best, at = -1, time.monotonic()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
                while True:
                    async with session.post(f"{url.rstrip('/')}/weights/send", json=order) as response:
                        if response.status not in (200, 202):
                            raise LoadFailed(f"{url} answered {response.status}: {(await response.text())[:400]}")
                        said = await response.json()
                    if response.status == 200:
                        return said
                    digested, now = min(int(said["digested"]), self.nbytes), time.monotonic()
                    if digested > best:
                        best, at = digested, now
                    elif now - at > ASK_S:
                        raise LoadFailed(f"{url} gets no further with the digests of its weights: {self._of(best)}")
                    await asyncio.sleep(AGAIN_S)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:  # TimeoutError is one
            if best < 0:
                raise
            gone = f"{url} went away while it digested its weights ({self._of(best)}): {type(error).__name__}: {error}"
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
                raise LoadFailed(f"no copy can be kept in host memory: {error}"[:500]) from error
        await asyncio.to_thread(self.memory.release)

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        self._sends += 1  # from now on their memory is not given back
        try:
            manifest = await self._manifest()
            meeting = await meet(host, port, nonce, self._token, self._host, self._timeout_s)
        except BaseException as error:
            self._sends -= 1
            if isinstance(error, SlacklineError) and not isinstance(error, LoadFailed):
                raise LoadFailed(str(error)) from error
            raise
        # A thread that nobody waits for at the end: a receiver that hangs must not keep the engine from stopping.
        to = f"{host}:{port}"
        threading.Thread(target=self._send, args=(meeting, to, self._sent(meeting)), daemon=True).start()
        return [list(info) for info in manifest]

    async def _manifest(self) -> list[TensorInfo]:
        """Raises Digesting, WeightsError. Digests are made at the first ask for them, once: whoever is never a source
        needs none, and on CPUs they take time from the steps."""
        if self._digesting is None or self._digesting.done():  # what is done may be of weights that are gone by now
            self._digesting = Future()
            self._digesting.set_running_or_notify_cancel()  # whoever stops waiting for it does not end it
            threading.Thread(target=self._digest, args=(self._digesting,), daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._digesting), HOLD_S)
        except TimeoutError:
            raise Digesting(self.memory.digested) from None
        except (RuntimeError, MemoryError) as error:
            raise LoadFailed(f"the weights cannot be digested: {error}"[:500]) from error

    def _digest(self, asked: Future[list[TensorInfo]]) -> None:
        """In a thread that the end of the engine does not wait for."""
        try:
            asked.set_result(self.memory.manifest())
        except Exception as error:  # of those who asked
            asked.set_exception(error)

    def _sent(self, meeting: Meeting) -> Callable[[], object]:
        """For the thread to call when it is done."""
        loop = asyncio.get_running_loop()

        async def end() -> None:
            self._sends -= 1
            await meeting.close()

        return lambda: asyncio.run_coroutine_threadsafe(end(), loop)

    def _send(self, meeting: Meeting, to: str, sent: Callable[[], object]) -> None:
        try:
            size = self.memory.send(meeting)
            log.info("sent %.1f MB of weights to %s", size / 1e6, to)
        except Exception as error:
            log.warning("weights for %s: %s", to, error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended: so does the engine
                sent()
