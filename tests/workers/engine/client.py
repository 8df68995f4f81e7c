"""What the HTTP tests do again and again."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import orjson
import requests

from tests.waiting import until_on_loop
from workers.actions import fleet_calls
from workers.engine.weights.peer_calls import call_fleet

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SAMPLE = re.compile(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


async def post(http: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """`path`: or a whole URL. A `token` in the body is proved, not sent (`process.FLEET`)."""
    if isinstance(body, dict) and "token" in body:
        token, rest = body["token"], {name: value for name, value in body.items() if name != "token"}
        url = path if path.startswith("http") else f"{http._base_url}".rstrip("/") + path
        at = url.index("/", len("https://"))
        base, target = url[:at], url[at:]
        answering = await call_fleet(http, base, "POST", target, rest, token)
    else:
        answering = await http.post(path, json=body, headers=headers)
    async with answering as response:
        return response.status, orjson.loads(await response.read() or b"null")


def post_once(engine_url: str, target: str, body: dict[str, Any]) -> requests.Response:
    """The same for tests without an event loop."""
    rest = {name: value for name, value in body.items() if name != "token"}
    return fleet_calls.call_fleet("POST", engine_url, target, body["token"], body=rest, timeout=60.0)


async def complete(http: aiohttp.ClientSession, **body: Any) -> dict[str, Any]:
    """A completion that must succeed."""
    status, answer = await post(http, COMPLETIONS, {"prompt": "hello", **body})
    assert status == 200, answer
    return answer


def events_of(raw: bytes) -> list[bytes]:
    """Payloads of a whole event stream, whose framing is checked. Comments (how its KV came) are left out."""
    assert raw.endswith(b"\n\n")
    events = [event for event in raw[:-2].split(b"\n\n") if not event.startswith(b":")]
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [event[6:] for event in events]


async def streamed(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream that must succeed; the closing [DONE] is checked and dropped."""
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.read()
        assert response.content_type == "text/event-stream"
        events = events_of(await response.read())
    assert events[-1] == b"[DONE]"
    return [orjson.loads(event) for event in events[:-1]]


async def samples(http: aiohttp.ClientSession) -> dict[tuple[str, str], float]:
    """Metric values by name and by the label that is not model or engine ("" if there is none)."""
    async with http.get("/metrics") as response:
        text = await response.text()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        extra = [text for label, text in LABEL.findall(labels) if label not in ("model_name", "engine")]
        found[name, "".join(extra)] = float(value)
    return found


async def metric(http: aiohttp.ClientSession, name: str, label: str = "") -> float:
    return (await samples(http))[f"vllm:{name}", label]


async def kv_received(http: aiohttp.ClientSession) -> float:
    """Bytes of KV that the engine has pulled so far."""
    async with http.get("/metrics") as response:
        text = await response.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("slackline_kv_received_bytes "))


async def kv_has_come(http: aiohttp.ClientSession, nbytes: float) -> None:
    """Return when the engine has pulled so much in all."""

    async def came() -> bool:
        return await kv_received(http) >= nbytes

    await until_on_loop(came, what=f"{nbytes} bytes have come")
