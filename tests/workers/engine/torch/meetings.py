"""Two ends of a transfer of weights, met in this process, and memory to move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import CPU, folder, program
from workers.engine.torch.weights.meeting import Meeting, awaited, meet
from workers.engine.torch.weights.transfer import WeightMemory

HOST = "127.0.0.1"
TOKEN = FLEET["token"]


def memory(present: bool = True, device: torch.device = CPU) -> WeightMemory:
    return WeightMemory(program(folder(), device=device).model.slots(), present=present)


@asynccontextmanager
async def met(host: str = HOST, timeout_s: float = 5.0) -> AsyncIterator[tuple[Meeting, Meeting]]:
    """The source's end and the receiver's."""
    async with awaited(host, TOKEN, timeout_s) as waiting:
        source = await meet(host, waiting.port, waiting.nonce, TOKEN, host, timeout_s)
        try:
            yield source, await waiting.met(timeout_s)
        finally:
            await source.close()
