"""Calls from one engine of the fleet to another over HTTP, with a proof of the fleet's token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from controller.core.errors import SlacklineError
from workers.http.fleet_proof import CHALLENGE_PATH, call_headers


class NoChallenge(SlacklineError):
    """There is no engine that asks for proofs: another program, or an engine of an older version."""


async def call_fleet(
    session: aiohttp.ClientSession, url: str, method: str, path: str, body: Mapping[str, Any] | None, token: str
) -> aiohttp.ClientResponse:
    """The answer, which the caller must close. `path`: with its query. Raises NoChallenge, and aiohttp's
    errors."""
    base, raw = url.rstrip("/"), b"" if body is None else orjson.dumps(body)
    async with session.get(base + CHALLENGE_PATH, allow_redirects=False) as given:
        try:
            challenge = (await given.json(content_type=None))["challenge"] if given.status == 200 else None
        except (ValueError, KeyError, TypeError):
            challenge = None
    if not isinstance(challenge, str):
        raise NoChallenge(f"{url} gave no challenge (status {given.status}): it is no engine of this version")
    headers = call_headers(token, challenge, base, method, path, raw)
    return await session.request(method, base + path, data=raw, headers=headers, allow_redirects=False)
