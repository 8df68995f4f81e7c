"""Every adapter by name. Importing this module registers the built-in ones."""

from __future__ import annotations

import aiohttp

from controller.core.types import InstanceSpec
from workers.backends import fake, reference, sglang, vllm
from workers.backends.base import BACKENDS, Backend, Limits

__all__ = ["BACKENDS", "backend_for", "fake", "reference", "sglang", "vllm"]


def backend_for(spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> Backend:
    """Raises UnknownName with the valid names."""
    return BACKENDS[spec.backend](spec, session, limits)
