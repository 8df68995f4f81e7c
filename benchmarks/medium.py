"""What carries weights from engine to engine, measured bare: one TCP stream, or a copy from device to device."""

from __future__ import annotations

import multiprocessing
import socket
import time

PIECE = 16 << 20


def raw_stream(size: int) -> float:
    """GB/s of one TCP stream of `size` bytes over loopback, process to process."""
    server = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("spawn").Process(target=_pour, args=(server.getsockname()[1], size))
    process.start()
    taken, _ = server.accept()
    room, got = memoryview(bytearray(PIECE)), 0
    began = time.monotonic()
    while count := taken.recv_into(room):
        got += count
    seconds = time.monotonic() - began
    process.join()
    taken.close()
    server.close()
    if got != size:
        raise RuntimeError(f"the raw stream brought {got} of {size} bytes")
    return size / seconds / 1e9


def _pour(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as target:
        block = memoryview(bytes(PIECE))
        for left in range(size, 0, -PIECE):
            target.sendall(block[: min(left, PIECE)])


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
