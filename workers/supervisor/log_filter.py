"""Copies its input to the end of a file, with secrets replaced by `[secret]`. It ends when its input does.

The secrets come as a JSON list in the first line of its input, so that they are on no command line and in no
environment. Standard library only: one runs beside each engine that has secrets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import cast

REPLACED = b"[secret]"
CHUNK = 65_536


def without(chunks: Iterable[bytes], hidden: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks without these values, also where one lies across two chunks. A line is passed on once it has ended;
    of a line without end only as much is held back as could begin a value."""
    values = sorted(hidden, key=len, reverse=True)
    longest = max((len(value) for value in values), default=1)
    held = b""
    for chunk in chunks:
        held = _cleaned(held + chunk, values)
        ended = held.rfind(b"\n") + 1
        passed = max(ended, len(held) - longest + 1)
        if passed > 0:
            yield held[:passed]
            held = held[passed:]
    if held:
        yield held


def _cleaned(text: bytes, values: Iterable[bytes]) -> bytes:
    for value in values:
        text = text.replace(value, REPLACED)
    return text


def main() -> int:
    source = cast(BufferedReader, sys.stdin.buffer)
    hidden = [value.encode() for value in json.loads(source.readline())]
    with open(sys.argv[1], "ab", buffering=0) as log:
        chunks = iter(lambda: source.read1(CHUNK), b"")  # not of the descriptor: some may have come with the first line
        for part in without(chunks, hidden):
            log.write(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
