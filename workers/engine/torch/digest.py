"""Digests of tensors, made where the tensor lies: XXH3 on the host, sums of mixed words on any other device.

On a CUDA device XXH3 would need every byte back on the host, through memory that was never touched, at a fraction of
what a link between devices moves; on a CPU it is several times as fast as anything that torch's operators can do. Both
ends of a move are of one kind of device, so both make the same digest without agreeing on it; each names its algorithm,
since a copy in host memory may be read by an engine of the other kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import xxhash

XXH3, WORDS = "xxh3", "words"
WORD = 8
CHUNK_WORDS = 1 << 21  # 16 MiB; three of them are all the memory that a digest takes on the device
ROWS = WORD  # of memory that is a slice of something wider: so many rows are whole words, whatever the type
_STEP, _FIRST, _SECOND = (  # of splitmix64, as torch's integers have signs
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)
_MOST = (1 << 64) - 1


def native(device: torch.device) -> str:
    """The algorithm for tensors there."""
    return XXH3 if device.type == "cpu" else WORDS


def algorithm_of(digest: str) -> str:
    """Raises ValueError for what no engine of this version made."""
    name, colon, _ = digest.partition(":")
    if not colon or name not in (XXH3, WORDS):
        raise ValueError(f"{digest[:40]!r} is no digest that is known here")
    return name


def digest(memory: torch.Tensor, algorithm: str = "") -> str:
    """Of the tensor's bytes in their order and of how many there are. `algorithm`: that of its device."""
    name = algorithm or native(memory.device)
    return f"{name}:{_xxh3(memory) if name == XXH3 else words(memory)}"


def _xxh3(memory: torch.Tensor) -> str:
    """On the host. Not through numpy: it would pin the storage to its size."""
    flat = memory.detach().cpu().contiguous()
    return xxhash.xxh3_64_hexdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def words(memory: torch.Tensor, chunk: int = CHUNK_WORDS) -> str:
    """Two sums mod 2^64 over the tensor's words of 8 bytes, each mixed with its place; the same on every device and for
    every `chunk`, as sums of integers that wrap do not depend on their order.

    The words are mixed first because a plain sum of products is blind to the highest bits: two signs that flip, or
    words swapped that differ in their highest bit, would leave it as it is.
    """
    most = max(1, min(chunk, -(-memory.nbytes // WORD)))
    place = torch.arange(1, most + 1, dtype=torch.int64, device=memory.device)
    mixed, other = torch.empty_like(place), torch.empty_like(place)
    sums = torch.zeros(2, dtype=torch.int64, device=memory.device)
    done = 0
    for raw in _pieces(memory.detach(), most):
        count = -(-raw.numel() // WORD)
        x, y = mixed[:count], other[:count]
        x[-1:].zero_()  # behind the last bytes of a tensor that is no whole number of words
        x.view(torch.uint8)[: raw.numel()].copy_(raw)
        torch.add(place[:count], done, out=y)
        x.add_(y.mul_(_STEP))
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            torch.bitwise_right_shift(x, shift, out=y)
            x.bitwise_xor_(y.bitwise_and_((1 << (64 - shift)) - 1))  # the shift copies the sign, which must not stay
            x.mul_(factor)
        sums[0] += x.sum()
        torch.add(place[:count], done, out=y)
        sums[1] += x.mul_(y.mul_(2).sub_(1)).sum()
        done += count
    first, second = (int(value) for value in sums.tolist())
    return f"{(first + memory.nbytes) & _MOST:016x}{second & _MOST:016x}"


def _pieces(memory: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Its bytes in order, at most so many words at a time, all but the last of them whole words."""
    if memory.is_contiguous():
        yield from _split(memory, most)
        return
    row = memory[:1].nbytes
    rows = max(1, most * WORD // (ROWS * row)) * ROWS
    for part in memory.split(rows):  # a copy of what is no longer than a chunk, or a few rows
        yield from _split(part.contiguous(), most)


def _split(memory: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if memory.numel():
        yield from memory.reshape(-1).view(torch.uint8).split(most * WORD)
