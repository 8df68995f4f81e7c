"""The events of a background response in memory, as they are written, and unpacked again."""

from __future__ import annotations

import asyncio
import json
import random
import zlib

import pytest

from api.openai import response_events
from api.openai.protocol.response_streams import StreamedResponse, as_response
from api.openai.response_events import EventLog, Unpacked, end_events

ID = "req-" + "0a1b2c3d4e5f" * 2


class Kept:
    """What is kept, as Redis keeps it. `away`: how many writes fail; `unheard`: how many are done without an answer."""

    def __init__(self):
        self.raw = b""
        self.away = self.unheard = 0
        self.dropped = False
        self.log = EventLog(self.write, self.drop)

    async def write(self, at, more):
        if self.away > 0:
            self.away -= 1
            return None
        if len(self.raw) != at + len(more):
            assert len(self.raw) == at
            self.raw += more
        if self.unheard > 0:
            self.unheard -= 1
            return None
        return "kept"

    async def drop(self):
        self.dropped = True


def numbered(first, count, size=10):
    return b"".join(b'event: x\ndata: {"n":%d,"text":"%s"}\n\n' % (n, b"x" * size) for n in range(first, first + count))


def unpacked(raw, after=-1, pieces=1):
    found, kept, size = b"", Unpacked(), -(-len(raw) // pieces)
    for at in range(0, len(raw), size):
        kept.feed(raw[at : at + size])
        while not kept.empty:
            found += kept.after(after)
    return found


@pytest.mark.parametrize("read_bytes", [7, 100, 64 << 10])
@pytest.mark.parametrize("pieces", [1, 3, 50])
async def test_what_was_written_is_read_from_any_event_on(monkeypatch, read_bytes, pieces):
    monkeypatch.setattr(response_events, "READ_BYTES", read_bytes)
    kept = Kept()
    for at in range(0, 90, 3):
        kept.log.add(numbered(at, 3, 40 * at))
        assert await kept.log.flush()
    assert kept.log.next == 90
    for after in (-1, 0, 44, 89, 200):
        told = b"".join(numbered(at, 3, 40 * at) for at in range(0, 90, 3)).split(b"\n\n")[after + 1 : -1]
        assert unpacked(kept.raw, after, pieces) == b"".join(each + b"\n\n" for each in told)


async def test_a_write_whose_answer_was_lost_is_repeated_and_nothing_is_kept_twice():
    kept = Kept()
    kept.unheard = kept.away = 1
    kept.log.add(numbered(0, 2))
    assert [await kept.log.flush() for _ in range(2)] == [False, False]
    kept.log.add(numbered(2, 2))
    assert await kept.log.flush()
    assert unpacked(kept.raw) == numbered(0, 4)


@pytest.mark.parametrize(("away", "lost"), [(response_events.CLOSE_TRIES - 1, False), (1_000, True)])
async def test_the_last_events_are_tried_again_before_they_are_given_up(monkeypatch, away, lost):
    monkeypatch.setattr(response_events, "FLUSH_S", 0.01)
    kept = Kept()
    kept.away = away
    kept.log.add(numbered(0, 2))
    await kept.log.close()
    assert (kept.log.lost, unpacked(kept.raw) if kept.raw else b"") == (lost, b"" if lost else numbered(0, 2))


async def test_what_waits_for_redis_is_bounded(monkeypatch):
    monkeypatch.setattr(response_events, "UNWRITTEN_BYTES", 20_000)
    monkeypatch.setattr(response_events, "TAIL_BYTES", 5_000)
    monkeypatch.setattr(response_events, "FLUSH_S", 0.01)
    kept = Kept()
    kept.away = 1_000_000
    kept.log.start()
    most = 0
    for at in range(0, 2000, 10):
        kept.log.add(numbered(at, 10))
        most = max(most, kept.log._bytes)
    assert (kept.log.lost, most < 21_000, kept.log._bytes <= 5_000) == (True, True, True)
    assert kept.log.since(3) is None
    assert kept.log.since(1998) == [numbered(1999, 1)]
    await asyncio.sleep(0.1)
    assert kept.dropped
    kept.log.end()


async def test_the_tail_stays_in_memory_and_no_more_once_it_is_kept(monkeypatch):
    monkeypatch.setattr(response_events, "TAIL_BYTES", 500)
    kept = Kept()
    for at in range(0, 1000, 10):
        kept.log.add(numbered(at, 10))
        await kept.log.flush()
    assert 0 < kept.log._bytes <= 500
    assert kept.log.since(989) == [numbered(number, 1) for number in range(990, 1000)]
    assert kept.log.since(1500) == []


def translated():
    translation = as_response({"model": "m"}, ID, 0.0, streamed=True)
    assert isinstance(translation, StreamedResponse)
    return translation


async def test_the_events_of_an_answer_take_at_most_20_bytes_a_token():
    chosen, kept, translation = random.Random(1), Kept(), translated()
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(1, 6))) for _ in range(3000)]
    kept.log.add(translation.begin())
    for _ in range(2000):
        chunk = {"choices": [{"index": 0, "delta": {"content": f"{chosen.choice(words)} "}}]}
        kept.log.add(translation.translate(b"data: " + json.dumps(chunk).encode() + b"\n\n"))
        await kept.log.flush()  # after each token, which takes most
    assert len(kept.raw) / 2000 <= 20


async def test_the_end_is_not_among_them():
    kept, translation = Kept(), translated()
    kept.log.add(translation.begin())
    kept.log.add(translation.translate(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'))
    await kept.log.close()
    events = unpacked(kept.raw).decode().split("\n\n")[:-1]
    assert [event.split("\n")[0].rpartition(".")[2] for event in events][-1:] == ["done"]
    assert len(events) == kept.log.next
    whole = translation.response.whole
    told = json.loads(end_events(whole, kept.log.next).decode().partition("data: ")[2])
    assert (told["type"], told["response"], told["sequence_number"]) == ("response.completed", whole, len(events))


def test_what_is_no_such_stream_is_an_error():
    kept = Unpacked()
    kept.feed(b"nothing that was packed")
    with pytest.raises(zlib.error):
        kept.after(-1)
