"""`python -m benchmarks.flow.echo SOCKET`: a process that sends each line back at once, as a daemon would that decides
nothing. What a line takes there and back is the machine's part of a permit."""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from workers.flowd.lines import line_batches

MAX_LINE = 1 << 10


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async for lines in line_batches(reader, MAX_LINE):
        writer.write(b"".join([line + b"\n" for line in lines]))
    writer.close()


async def _serve(path: str) -> None:
    server = await asyncio.start_unix_server(_echo, path)
    gc.freeze()  # as the daemon does
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
