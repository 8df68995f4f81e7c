"""Attacks on the fleet's token and on engines that are reached directly, for `bench_attacks`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

from workers.actions.sleep_client import ReferenceSleepClient
from workers.actions.weights_client import EngineAway, EngineRefuses
from workers.http.fleet_proof import CHALLENGE_PATH

Outcome = tuple[bool, str]


@contextmanager
def relay(victim: str, heard: list[bytes], answers: list[int]) -> Iterator[str]:
    """The URL of a program that records what it is sent and passes it on to the victim at once."""

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            heard.extend((self.path.encode(), str(self.headers).encode(), body))
            passed = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            said = requests.request(self.command, victim + self.path, data=body, headers=passed, timeout=10)
            if self.path != CHALLENGE_PATH:
                answers.append(said.status_code)
            self.send_response(said.status_code)
            self.send_header("Content-Length", str(len(said.content)))
            self.end_headers()
            self.wfile.write(said.content)

        do_GET = do_POST = pass_on

        def log_message(self, *said: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


async def harvest(victim: str, token: str, key: str) -> Outcome:
    """The fleet orders a registered listener to sleep, and the listener has the order carried out elsewhere."""
    return await asyncio.to_thread(_harvest, victim, token, key)


def _harvest(victim: str, token: str, key: str) -> Outcome:
    heard: list[bytes] = []
    answers: list[int] = []
    with relay(victim, heard, answers) as url, suppress(EngineAway, EngineRefuses):
        ReferenceSleepClient(url, token).sleep(2)
    told = any(token.encode() in each for each in heard)
    asleep = requests.get(f"{victim}/is_sleeping", headers={"Authorization": f"Bearer {key}"}, timeout=10).json()
    seen = (
        f"token {'heard' if told else 'not heard'}; another engine answered {answers}; asleep: {asleep['is_sleeping']}"
    )
    return not told and answers == [403] and not asleep["is_sleeping"], seen


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
