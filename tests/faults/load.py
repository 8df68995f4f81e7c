"""Steady requests from a thread of their own: when each was sent, how it ended, how long it took."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from tests.faults.system import System

REQUEST_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Sent:
    """`ended`: done, error event, cut, "429" ...; times are monotonic seconds."""

    at: float
    streamed: bool
    id: str = ""
    ended: str = "open"
    instance: str = ""
    first_s: float | None = None
    took_s: float = 0.0
    text: str = ""


@dataclass(slots=True)
class Load:
    """`with Load(system, rate=20, ...) as load:` sends until the block ends, then waits for every answer."""

    system: System
    rate: float
    body: dict[str, Any] = field(default_factory=dict)
    words: int = 20
    sent: list[Sent] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(REQUEST_TIMEOUT_S + 10)
        assert not self._thread.is_alive(), "requests without an end"

    async def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self.system.key()}"}
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            tasks, due = [], time.monotonic()
            mixed = random.Random(1)  # taking turns could give one of two engines all the streams
            while not self._stop.is_set():
                sent = Sent(time.monotonic(), streamed=mixed.random() < 0.5)
                self.sent.append(sent)
                tasks.append(asyncio.create_task(self._send(session, sent, len(self.sent))))
                due += 1 / self.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*tasks)

    async def _send(self, session: aiohttp.ClientSession, sent: Sent, number: int) -> None:
        prompt = " ".join(f"word{number}" for _ in range(self.words))
        body = {"model": "demo", "prompt": prompt, "stream": sent.streamed, **self.body}
        try:
            async with session.post(f"{self.system.gateway}/v1/completions", json=body) as answer:
                sent.id = answer.headers.get("x-slackline-request-id", "")
                sent.instance = answer.headers.get("x-slackline-instance", "")
                sent.ended = await (_stream if sent.streamed and answer.status == 200 else _whole)(answer, sent)
        except (aiohttp.ClientError, TimeoutError) as error:
            sent.ended = repr(error)
        sent.took_s = time.monotonic() - sent.at

    # -- figures -------------------------------------------------------------------------------------------------

    def ends(self) -> Counter[str]:
        return Counter(sent.ended for sent in list(self.sent))

    def streaming(self, instance: str) -> int:
        """Answers of it that have begun and not ended."""
        sent = list(self.sent)
        return sum(each.instance == instance and each.ended == "open" and each.first_s is not None for each in sent)

    def served(self, instance: str) -> int:
        """Answers of it that have ended well."""
        return sum(each.instance == instance and each.ended == "done" for each in list(self.sent))

    def between(self, start: float, end: float) -> list[Sent]:
        return [sent for sent in list(self.sent) if start <= sent.at < end]


async def _whole(answer: aiohttp.ClientResponse, sent: Sent) -> str:
    sent.text = await answer.text()
    if answer.status == 200:
        return "done" if orjson.loads(sent.text)["choices"] else "empty"
    return f"{answer.status} {orjson.loads(sent.text)['error']['code']}"


async def _stream(answer: aiohttp.ClientResponse, sent: Sent) -> str:
    parts = []
    async for part in answer.content.iter_any():
        sent.first_s = sent.first_s or time.monotonic() - sent.at
        parts.append(part)
    text = b"".join(parts).decode()
    if text.rstrip().endswith("data: [DONE]"):
        return "done"
    last = text.rstrip().rpartition("data: ")[2]
    if '"error"' in last:
        sent.text = last
        return "error event"
    return f"cut without a word: {text[-100:]}"


def quantile_ms(sent: list[Sent], share: float = 0.99) -> float:
    """Of the whole answers' times."""
    times = sorted(each.took_s for each in sent)
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]


def missing_and_doubled(system: System, sent: list[Sent]) -> tuple[list[str], list[str]]:
    """Ids without a record, and ids with more than one."""
    ids = [each.id for each in sent]
    sql = "SELECT id, count(*) FROM request_record WHERE id = ANY(%s) GROUP BY id"
    found = dict(system.query(sql, ids))
    return [id for id in ids if id not in found], [id for id, count in found.items() if count > 1]


def recorded(system: System, sent: list[Sent], within_s: float = 20.0) -> float:
    """Waits until each has its one record; seconds that took."""
    assert all(each.id for each in sent), "answers without a request id"
    waited = system.until(lambda: not missing_and_doubled(system, sent)[0], within_s)
    assert missing_and_doubled(system, sent) == ([], [])
    [(rows, summed)] = system.query(
        "SELECT (SELECT count(*) FROM request_record), (SELECT sum(finished + cancelled) FROM attainment_minute)"
    )
    assert rows == summed, "the minutes count other requests than the records"
    return waited
