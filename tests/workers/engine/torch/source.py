"""A source that goes silent: `python -m tests.workers.engine.torch.source MODEL TENSORS`.

Says that it is ready and reads where it is awaited (a line of host, port and nonce); sends so many tensors as an engine
does, says that it is silent and waits forever, with its connections open.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from tests.workers.engine.torch.bench import CPU, program
from tests.workers.engine.torch.meetings import TOKEN
from workers.engine.torch.weights.meeting import RECEIVER, SENDER, meet
from workers.engine.torch.weights.transfer import WeightMemory


async def main(path: str, tensors: str) -> None:
    memory = WeightMemory(program(Path(path)).model.slots(), present=True)
    print("ready", flush=True)
    host, port, nonce = sys.stdin.readline().split()
    meeting = await meet(host, int(port), nonce, TOKEN, host, 60.0)
    await asyncio.to_thread(begin, memory, meeting, int(tensors))


def begin(memory: WeightMemory, meeting: Any, tensors: int) -> None:
    group = meeting.group(SENDER, CPU)
    for tag, tensor in enumerate(list(memory._memory.values())[:tensors], 1):
        group.send([tensor.contiguous().view(-1)], RECEIVER, tag).wait()
    print("silent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
