"""Lines of a stream, all that have arrived at once: under load one wake-up of the reader then serves many of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

CHUNK = 1 << 16  # bytes


async def line_batches(reader: asyncio.StreamReader, most: int) -> AsyncIterator[list[bytes]]:
    """Lists of lines without their ends, until the stream ends; what follows the last end of a line is one too.

    Raises ValueError if a line has more than `most` bytes, and what reading raises.
    """
    rest = b""
    while data := await reader.read(CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > most or any(len(line) > most for line in lines):
            raise ValueError(f"a line has more than {most} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]
