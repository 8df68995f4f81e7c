"""Digests of tensors, computed on the device of the tensor: XXH3 on the host, sums of mixed words on other devices.

For a CUDA device, XXH3 would require copying every byte to fresh host memory, at a fraction of the speed of a link
between devices. On a CPU, XXH3 is several times as fast as torch's operators. Both sides of a transfer have the same
kind of device, so they use the same algorithm. Each digest names its algorithm, since a copy in host memory may be read
by an engine with another kind of device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import xxhash

XXH3, WORDS = "xxh3", "words"
WORD = 8
CHUNK_WORDS = 1 << 21  # 16 MiB; a digest needs three times this memory on the device
ROWS = WORD  # this many rows of a slice are a whole number of words, whatever the type
_STEP, _FIRST, _SECOND = (  # constants of splitmix64 as signed integers, which torch uses
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)
_MOST = (1 << 64) - 1


def native(device: torch.device) -> str:
    """The algorithm for tensors on this device."""
    return XXH3 if device.type == "cpu" else WORDS


def algorithm_of(digest: str) -> str:
    """The algorithm that made the digest. Raises ValueError if this version does not know it."""
    name, colon, _ = digest.partition(":")
    if not colon or name not in (XXH3, WORDS):
        raise ValueError(f"{digest[:40]!r} is not a digest of a known algorithm")
    return name


def digest(memory: torch.Tensor, algorithm: str = "") -> str:
    """The digest of the tensor's bytes and their number. `algorithm`: "" for that of its device."""
    name = algorithm or native(memory.device)
    return f"{name}:{_xxh3(memory) if name == XXH3 else words(memory)}"


def _xxh3(memory: torch.Tensor) -> str:
    """XXH3 on the host. numpy is not used, since a view of it would keep the storage from being resized."""
    flat = memory.detach().cpu().contiguous()
    return xxhash.xxh3_64_hexdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def words(memory: torch.Tensor, chunk: int = CHUNK_WORDS) -> str:
    """Two sums mod 2^64 over the tensor's words of 8 bytes, each mixed with its position. The result is the same on
    every device and for every `chunk`, since wrapping sums do not depend on the order.

    The words are mixed first because a plain sum of products misses changes of the highest bits, such as two flipped
    signs, or swapped words that differ in their highest bit.
    """
    most = max(1, min(chunk, -(-memory.nbytes // WORD)))
    place = torch.arange(1, most + 1, dtype=torch.int64, device=memory.device)
    mixed, other = torch.empty_like(place), torch.empty_like(place)
    sums = torch.zeros(2, dtype=torch.int64, device=memory.device)
    done = 0
    for raw in _pieces(memory.detach(), most):
        count = -(-raw.numel() // WORD)
        x, y = mixed[:count], other[:count]
        x[-1:].zero_()  # padding of a tensor whose bytes are not a whole number of words
        x.view(torch.uint8)[: raw.numel()].copy_(raw)
        torch.add(place[:count], done, out=y)
        x.add_(y.mul_(_STEP))
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            torch.bitwise_right_shift(x, shift, out=y)
            x.bitwise_xor_(y.bitwise_and_((1 << (64 - shift)) - 1))  # masks the copies of the sign bit
            x.mul_(factor)
        sums[0] += x.sum()
        torch.add(place[:count], done, out=y)
        sums[1] += x.mul_(y.mul_(2).sub_(1)).sum()
        done += count
    first, second = (int(value) for value in sums.tolist())
    return f"{(first + memory.nbytes) & _MOST:016x}{second & _MOST:016x}"


def _pieces(memory: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The bytes in order, at most `most` words at a time; all pieces but the last are whole words."""
    if memory.is_contiguous():
        yield from _split(memory, most)
        return
    row = memory[:1].nbytes
    rows = max(1, most * WORD // (ROWS * row)) * ROWS
    for part in memory.split(rows):  # copies at most a chunk, or a few rows
        yield from _split(part.contiguous(), most)


def _split(memory: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if memory.numel():
        yield from memory.reshape(-1).view(torch.uint8).split(most * WORD)
