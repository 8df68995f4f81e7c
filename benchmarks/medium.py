"""What carries weights from engine to engine, measured bare: one TCP stream, or a copy from device to device.

A stream is measured twice. `raw_stream` sends one piece over and over and receives into another: both stay in the
processor's caches, so that it says what the connection alone can do. `memory_stream` sends from all of a memory into
all of another one, both touched before: what any transfer of that size must do at least.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import time

PIECE = 16 << 20


def raw_stream(size: int) -> float:
    """GB/s of one TCP stream of `size` bytes over loopback, process to process, out of and into caches."""
    return _stream(size, min(PIECE, size))


def memory_stream(size: int) -> float:
    """GB/s of one TCP stream of `size` bytes over loopback, process to process, from memory to memory."""
    return _stream(size, size)


def _stream(size: int, held: int) -> float:
    """`held`: bytes of memory at either end, used again and again until `size` have passed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=_pour, args=(port, size, held))
        process.start()
        room, got = _touched(held), 0
        taken, _ = server.accept()
        with taken:
            began = time.monotonic()
            while count := taken.recv_into(room if held < size else room[got : got + PIECE]):
                got += count
            seconds = time.monotonic() - began
        process.join()
    if got != size:
        raise RuntimeError(f"the raw stream brought {got} of {size} bytes")
    return size / seconds / 1e9


def _touched(size: int) -> memoryview:
    """Memory that is there, in huge pages where the kernel gives them, as an engine's is."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, PIECE):
        memory[at : at + PIECE] = b"\1" * min(PIECE, size - at)
    return memoryview(memory)


def _pour(port: int, size: int, held: int) -> None:
    block = _touched(held)
    with socket.create_connection(("127.0.0.1", port)) as target:
        for at in range(0, size, PIECE):
            begin = at % held
            target.sendall(block[begin : begin + min(PIECE, size - at, held - begin)])


def device_copy(size: int, source: str, target: str) -> float:
    """GB/s of `size` bytes copied in pieces between the memories of two devices, such as `cuda:0` and `cuda:1`."""
    import torch

    def settled() -> None:
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)

    block, room = (torch.zeros(min(PIECE, size), dtype=torch.uint8, device=device) for device in (source, target))
    room.copy_(block)  # first use of a path is slow
    settled()
    began = time.monotonic()
    for left in range(size, 0, -PIECE):
        room[: min(left, PIECE)].copy_(block[: min(left, PIECE)])
    settled()
    return size / (time.monotonic() - began) / 1e9
