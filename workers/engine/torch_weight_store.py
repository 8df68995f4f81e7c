"""The weights of the PyTorch executor behind the engine's loop: each call in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from controller.core.errors import SlacklineError
from workers.engine.torch_meeting import Meeting, awaited, meet
from workers.engine.torch_transfer import TensorInfo, WeightMemory
from workers.engine.weights import LoadFailed, Source

ASK_S = 10.0
log = logging.getLogger("workers.engine")


class TorchWeights:
    """`host`: where this engine can be reached by others; `timeout_s`: for two engines to become a group."""

    def __init__(self, memory: WeightMemory, folder: Path, host: str, token: str, timeout_s: float) -> None:
        self.memory = memory
        self._folder = folder
        self._host = host
        self._token = token
        self._timeout_s = timeout_s
        self._sends = 0

    @property
    def sending(self) -> bool:
        return self._sends > 0

    @property
    def present(self) -> bool:
        return self.memory.present

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def has_host_copy(self) -> bool:
        return self.memory.has_host_copy

    async def load(self, source: Source) -> int:
        try:
            if source.kind == "engine":
                return await self._receive(source.url)
            if source.kind == "host":
                return await asyncio.to_thread(self.memory.load_host)
            return await asyncio.to_thread(self.memory.load_disk, self._folder)
        except Exception as error:  # what a source answers may be anything
            self.memory.release()
            raise LoadFailed(f"{type(error).__name__}: {error}"[:500]) from error

    async def _receive(self, url: str) -> int:
        async with awaited(self._host, self._token, self._timeout_s) as waiting:
            order = {"token": self._token, "host": self._host, "port": waiting.port, "nonce": waiting.nonce}
            timeout = aiohttp.ClientTimeout(total=ASK_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{url.rstrip('/')}/weights/send", json=order) as response,
            ):
                if response.status != 200:
                    raise LoadFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
                manifest = (await response.json())["tensors"]
            theirs = [TensorInfo(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in manifest]
            meeting = await waiting.met(ASK_S)
            return await asyncio.to_thread(self.memory.receive, meeting, theirs)

    async def release(self, keep_host_copy: bool) -> None:
        if not keep_host_copy:
            self.memory.drop_host_copy()
        elif self.memory.present:
            try:
                await asyncio.to_thread(self.memory.keep_host_copy)
            except (RuntimeError, MemoryError) as error:
                raise LoadFailed(f"no copy can be kept in host memory: {error}"[:500]) from error
        await asyncio.to_thread(self.memory.release)

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        self._sends += 1  # from now on their memory is not given back
        try:
            manifest = await asyncio.to_thread(self.memory.manifest)
            meeting = await meet(host, port, nonce, self._token, self._host, self._timeout_s)
        except BaseException as error:
            self._sends -= 1
            if isinstance(error, SlacklineError):
                raise LoadFailed(str(error)) from error
            raise
        # A thread that nobody waits for at the end: a receiver that hangs must not keep the engine from stopping.
        to = f"{host}:{port}"
        threading.Thread(target=self._send, args=(meeting, to, self._sent(meeting)), daemon=True).start()
        return [list(info) for info in manifest]

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
