"""Attacks on the fleet's token and on engines that are reached directly, for `bench_attacks`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

from workers.actions.sleep_client import ReferenceSleepClient
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.http.fleet_proof import CHALLENGE_PATH

Outcome = tuple[bool, str]
Answer = tuple[int, bytes]


@contextmanager
def listener(answer: Callable[[str, str, dict[str, str], bytes], Answer]) -> Iterator[str]:
    """The URL of a program that an operator registered. `answer`: by method, path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, said = answer(self.command, self.path, dict(self.headers.items()), body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = handle_any

        def log_message(self, *said: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Relay:
    """What a listener answers that records what it is sent and passes it on to the victim at once: the fleet's proof is
    then for a challenge of the victim. `answers`: the victim's, to what needs a proof."""

    def __init__(self, victim: str) -> None:
        self._victim = victim
        self.heard: list[bytes] = []
        self.answers: list[Answer] = []

    def __call__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        self.heard += [path.encode(), str(headers).encode(), body]
        passed = {name: value for name, value in headers.items() if name.lower() != "host"}
        said = requests.request(method, self._victim + path, data=body, headers=passed, timeout=10)
        if path != CHALLENGE_PATH:
            self.answers.append((said.status_code, said.content))
        return said.status_code, said.content


async def harvest(victim: str, token: str, key: str) -> Outcome:
    """The fleet orders a registered listener to sleep, and the listener has the order carried out elsewhere."""
    return await asyncio.to_thread(_harvest, victim, token, key)


def _harvest(victim: str, token: str, key: str) -> Outcome:
    relay = Relay(victim)
    with listener(relay) as url, suppress(EngineAway, EngineRefuses):
        ReferenceSleepClient(url, token).sleep(2)
    told = any(token.encode() in each for each in relay.heard)
    asleep = requests.get(f"{victim}/is_sleeping", headers={"Authorization": f"Bearer {key}"}, timeout=10).json()
    answered, sleeps = [status for status, _ in relay.answers], asleep["is_sleeping"]
    seen = f"token {'heard' if told else 'not heard'}; another engine answered {answered}; asleep: {sleeps}"
    return not told and answered == [403] and not sleeps, seen


async def stranger(victim: str) -> Outcome:
    """Somebody on the engines' network without key and proof."""
    return await asyncio.to_thread(_stranger, victim)


def _stranger(victim: str) -> Outcome:
    body = {"prompt": "x", "max_tokens": 1}
    calls = {"/reset_prefix_cache": {}, "/v1/completions": body, "/sleep?level=2": {}, "/kv/release": {}}
    posted = {path: requests.post(victim + path, json=each, timeout=10).status_code for path, each in calls.items()}
    read = {
        path: requests.get(victim + path, timeout=10).status_code for path in ("/metrics", "/server_info", "/links")
    }
    statuses = {**posted, **read}
    return all(status in (401, 403) for status in statuses.values()), str(statuses)
