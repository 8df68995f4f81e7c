"""Calls of the supervisor to processes that it started, on this machine.

They carry keys, so they go nowhere else: through no proxy of the environment, and they follow no redirect.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast


class _Stays(urllib.request.HTTPRedirectHandler):
    """Redirects are errors: urllib would send the headers on to the new address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays)


def opened(url: str, headers: Mapping[str, str], timeout_s: float) -> HTTPResponse:
    """The answer to a GET request, which the caller must close. Raises urllib.error.HTTPError for any status from 300
    on, OSError and http.client.HTTPException."""
    return cast(HTTPResponse, _DIRECT.open(urllib.request.Request(url, headers=dict(headers)), timeout=timeout_s))
