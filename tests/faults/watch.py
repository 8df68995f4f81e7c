"""What a person in front of the pages sees during a fault: a page asked for again and again, and a live socket."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.faults.system import System

PAGE_TIMEOUT_S = 20.0
EVERY_S = 1.0


@dataclass(slots=True)
class Page:
    at: float
    status: int  # 0: no answer in PAGE_TIMEOUT_S
    took_s: float
    text: str


@dataclass(slots=True)
class Frame:
    """`gap_s` since the frame before it."""

    at: float
    gap_s: float
    content: dict[str, Any]

    @property
    def stale(self) -> bool:
        return bool(self.content.get("stale"))


@dataclass(slots=True)
class Watch:
    """`with Watch(system) as watch:` looks until the block ends. Times are monotonic seconds."""

    system: System
    pages: list[Page] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    sockets_lost: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        session = self.system.sign_in("viewer")
        for work in (self._look, self._listen):
            self._threads.append(threading.Thread(target=work, args=(session,), name=work.__name__))
            self._threads[-1].start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PAGE_TIMEOUT_S + 5)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _look(self, session: requests.Session) -> None:
        while not self._stop.wait(EVERY_S):
            began = time.monotonic()
            try:
                answer = session.get(self.system.console, timeout=PAGE_TIMEOUT_S)
                status, text = answer.status_code, answer.text
            except requests.RequestException as error:
                status, text = 0, repr(error)
            self.pages.append(Page(began, status, time.monotonic() - began, text))

    def _listen(self, session: requests.Session) -> None:
        while not self._stop.is_set():
            try:
                self._follow(session)
            except (ConnectionClosed, InvalidStatus, OSError, TimeoutError) as error:
                self.sockets_lost.append(repr(error))
                self._stop.wait(0.5)

    def _follow(self, session: requests.Session) -> None:
        cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in session.cookies)
        url = self.system.console.replace("http", "ws", 1) + "/ws/overview"
        with connect(url, origin=self.system.console, additional_headers={"Cookie": cookies}) as socket:  # type: ignore[arg-type]
            before = time.monotonic()
            while not self._stop.is_set():
                try:
                    content = json.loads(socket.recv(timeout=1.0))
                except TimeoutError:
                    continue
                now = time.monotonic()
                self.frames.append(Frame(now, now - before, content))
                before = now

    # -- figures -------------------------------------------------------------------------------------------------

    def pages_between(self, start: float, end: float) -> list[Page]:
        return [page for page in self.pages if start <= page.at < end]

    def frames_between(self, start: float, end: float) -> list[Frame]:
        return [frame for frame in self.frames if start <= frame.at < end]
