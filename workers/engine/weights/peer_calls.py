"""Calls from one engine of the fleet to another over HTTP, with a proof of the fleet's token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from workers.http.fleet_proof import CHALLENGE_PATH, call_headers, challenge_in


async def call_fleet(
    session: aiohttp.ClientSession, url: str, method: str, path: str, body: Mapping[str, Any] | None, token: str
) -> aiohttp.ClientResponse:
    """The answer, which the caller must close. `path`: with its query. Raises NoChallenge, and aiohttp's
    errors."""
    base, raw = url.rstrip("/"), b"" if body is None else orjson.dumps(body)
    async with session.get(base + CHALLENGE_PATH, allow_redirects=False) as given:
        challenge = challenge_in(await given.read(), given.status, base)
    headers = call_headers(token, challenge, base, method, path, raw)
    return await session.request(method, base + path, data=raw, headers=headers, allow_redirects=False)
