"""One call to an engine's adapter from code that is not async: a session of its own, closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from controller.core.types import InstanceSpec
from workers.backends.base import Backend, Limits
from workers.backends.registry import backend_for

T = TypeVar("T")


def ask(spec: InstanceSpec, work: Callable[[Backend], Awaitable[T]], limits: Limits | None = None) -> T:
    """The answer of `work`. Not from inside a running loop."""

    async def run() -> T:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            return await work(backend_for(spec, session, limits or Limits()))

    return asyncio.run(run())
