"""Every adapter by name, and a call to one from code that is not async. Importing this registers the built-in ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from controller.core.types import InstanceSpec
from workers.backends import fake, reference, sglang, vllm
from workers.backends.base import BACKENDS, Backend, Limits
from workers.http.outbound import connector

__all__ = ["BACKENDS", "ask", "backend_for", "fake", "reference", "sglang", "vllm"]

T = TypeVar("T")


def backend_for(spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> Backend:
    """Raises UnknownName with the valid names."""
    return BACKENDS[spec.backend](spec, session, limits)


def ask(spec: InstanceSpec, work: Callable[[Backend], Awaitable[T]], limits: Limits | None = None) -> T:
    """The result of `work`, done in a session of its own. Must not be called from a running loop."""

    async def run() -> T:
        async with aiohttp.ClientSession(connector=connector(), auto_decompress=False) as session:
            return await work(backend_for(spec, session, limits or Limits()))

    return asyncio.run(run())
