"""What tests of the transfer daemon share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.conf import settings

from workers.live import LiveState


@pytest.fixture
async def redis(redis_server: Any) -> AsyncIterator[LiveState]:
    """An empty one."""
    state = LiveState(settings.REDIS_URL)
    await state._redis.flushdb()
    yield state
    await state.close()
