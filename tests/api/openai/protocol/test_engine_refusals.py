"""What a client is told of an engine's 4xx: an engine's error, never the page of whatever answers at its address.

Found by attack: an operator who registers a URL inside the network could read up to 2,000 characters of each 4xx there.
"""

from __future__ import annotations

import json

import pytest

from api.openai.protocol.errors import engine_refusal

OURS = {"message": "prompt is too long", "type": "invalid_request_error", "param": "prompt", "code": 400}


@pytest.mark.parametrize("said", [{"error": OURS}, {"object": "error", **OURS}, {"error": {**OURS, "code": None}}])
def test_an_engines_error_is_passed_on(said: object) -> None:
    error = engine_refusal(400, json.dumps(said).encode())
    assert (error.status, error.message, error.param) == (400, "prompt is too long", "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"<html><h1>Jenkins: no valid crumb in the request of admin</h1>",
        b"secret of a service",
        b'"secret of a service"',
        b'["secret of a service"]',
        b'{"message": "secret of a service"}',
        b'{"detail": "secret of a service"}',
        b'{"error": "secret of a service"}',
        b'{"error": {"message": "secret of a service", "status": "PERMISSION_DENIED", "code": 403}}',
        b'{"error": {"message": "secret of a service", "type": 3}}',
        b'{"error": {"message": ["secret of a service"], "type": "x"}}',
        b'{"error": {"message": " ", "type": "x"}}',
        b'{"object": "error", "detail": "secret of a service"}',
        b"\xff\xfe",
        b"",
    ],
)
def test_anything_else_is_not(body: bytes) -> None:
    error = engine_refusal(403, body)
    assert (error.status, error.message, error.param) == (403, "The engine refused the request (403).", None)
