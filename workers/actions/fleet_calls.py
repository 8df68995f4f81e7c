"""Calls of jobs to reference engines, with a proof of the fleet's token (`workers.http.fleet_proof`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import orjson
import requests

from workers.http import outbound
from workers.http.engine_keys import NO_KEY, EngineKey
from workers.http.fleet_proof import CHALLENGE_PATH, call_headers, challenge_in


def call_fleet(
    method: str,
    url: str,
    path: str,
    token: str,
    *,
    body: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | tuple[float, float],
    key: EngineKey = NO_KEY,
) -> requests.Response:
    """The answer of the engine at `url`. Raises requests.RequestException, NoChallenge."""
    base = url.rstrip("/")
    target = f"{path}?{urlencode(params, doseq=True)}" if params else path
    raw = b"" if body is None else orjson.dumps(body)
    given = outbound.get(base + CHALLENGE_PATH, timeout=timeout[0] if isinstance(timeout, tuple) else timeout)
    challenge = challenge_in(given.content, given.status_code, base)
    headers = key.headers() | call_headers(token, challenge, base, method, target, raw)
    return outbound.request(method, base + target, data=raw, headers=headers, timeout=timeout)
