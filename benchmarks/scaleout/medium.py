"""Raw bandwidth of the medium over which weights move: one TCP stream, or a copy between devices.

A stream is measured in two ways. `raw_stream` sends one piece again and again and receives into another; both stay in
the processor's caches, so this is the speed of the connection alone. `memory_stream` sends from one whole memory into
another, both touched before, which is the least that a transfer of that size has to do.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIECE = 16 << 20
START_S = 60.0  # to wait for the sender


def raw_stream(size: int, host: str = "127.0.0.1", before: Sequence[str] = ()) -> float:
    """GB/s of one TCP stream of `size` bytes between two processes, out of and into caches, to `host`.

    `before`: where the sender runs (`network.SecondHost.command`).
    """
    return _stream(size, min(PIECE, size), host, before)


def memory_stream(size: int, host: str = "127.0.0.1", before: Sequence[str] = ()) -> float:
    """The same, from memory to memory."""
    return _stream(size, size, host, before)


def _stream(size: int, held: int, host: str, before: Sequence[str]) -> float:
    """`held`: bytes of memory at either end, used again and again until `size` have passed."""
    with socket.create_server((host, 0)) as server:
        server.settimeout(START_S)
        told = (host, str(server.getsockname()[1]), str(size), str(held))
        process = subprocess.Popen([*before, sys.executable, "-m", "benchmarks.scaleout.medium", *told], cwd=ROOT)
        room, got = _touched(held), 0
        taken, _ = server.accept()
        with taken:
            began = time.monotonic()
            while count := taken.recv_into(room if held < size else room[got : got + PIECE]):
                got += count
            seconds = time.monotonic() - began
        process.wait()
    if got != size:
        raise RuntimeError(f"the raw stream brought {got} of {size} bytes")
    return size / seconds / 1e9


def _touched(size: int) -> memoryview:
    """Touched memory, in huge pages if the kernel gives them, like an engine's."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, PIECE):
        memory[at : at + PIECE] = b"\1" * min(PIECE, size - at)
    return memoryview(memory)


def _pour(host: str, port: int, size: int, held: int) -> None:
    block = _touched(held)
    with socket.create_connection((host, port)) as target:
        for at in range(0, size, PIECE):
            begin = at % held
            target.sendall(block[begin : begin + min(PIECE, size - at, held - begin)])


def device_copy(size: int, source: str, target: str) -> float:
    """GB/s of `size` bytes copied in pieces between the memories of two devices, such as `cuda:0` and `cuda:1`, or
    between one and pinned memory of the host (`cpu`)."""
    import torch

    def settled() -> None:
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)

    pinned = source != target  # needs a CUDA device
    block, room = (
        torch.zeros(min(PIECE, size), dtype=torch.uint8, device=device, pin_memory=pinned and device == "cpu")
        for device in (source, target)
    )
    room.copy_(block)  # the first use of a path is slow
    settled()
    began = time.monotonic()
    for left in range(size, 0, -PIECE):
        room[: min(left, PIECE)].copy_(block[: min(left, PIECE)])
    settled()
    return size / (time.monotonic() - began) / 1e9


if __name__ == "__main__":
    _pour(sys.argv[1], *map(int, sys.argv[2:]))
