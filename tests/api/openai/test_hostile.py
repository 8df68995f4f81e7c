"""Every address of the data path with what no client of ours would send: an error of OpenAI's shape, never a 500."""

from __future__ import annotations

import json

import pytest

from api.openai.app import SERVED
from tests.api.openai.gateways import KEY, Client, TestBed, completion
from workers.backends.fake import Script

NUL = "\x00"
TEXTS = (NUL, f"a{NUL}b", "😀" * 80, "x" * 3000, "NaN", "9" * 40, "0001-01-01T00:00:00+23:59")
OTHERS = (-1, 0, 1e308, 2**63, 10**400, True, None, [], {}, [NUL], {NUL: NUL}, [[[]]])
FIELDS = (
    "model", "prompt", "messages", "input", "instructions", "tools", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "temperature", "stream", "stream_options", "n", "best_of", "slo_class", "priority", "deadline",
    "target_ttft", "target_tbt", "waiting_time", "metadata", "request_id", "user", "stop", "logit_bias", NUL,
)  # fmt: skip
RAW = (b"", b"\x00", b"\xff\xfe", b"{", b"[" * 5000, b'{"model": "\\ud800"}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000)
PATHS = ("/", "/v1/models/" + NUL, "/v1/models/" + "x" * 3000, "/v1/responses/" + NUL, "/" + NUL, "/v1/é", "/healthz/")
HEADERS = (
    [(b"authorization", b"Bearer \x00\xff")],
    [(b"authorization", b"\xff" * 3000)],
    [(b"authorization", b"Bearer " + KEY.encode()), (b"content-length", b"9" * 5000)],
    [(b"authorization", b"Bearer " + KEY.encode()), (b"content-length", b"-1"), (b"x-request-id", b"\x00\xff")],
)  # fmt: skip


def usual(path: str) -> dict[str, object]:
    body = completion()
    if path != "/v1/completions":
        body.pop("prompt")
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"input": "x"}
        body |= {"max_tokens": 4} if "chat" in path else {}
        if "responses" in path:
            body.pop("max_tokens")
    return body


def checked(answers: dict[str, int]) -> None:
    """504: it asked to wait for no time at all."""
    assert {what: status for what, status in answers.items() if not 200 <= status < 500 and status != 504} == {}


@pytest.mark.parametrize("path", SERVED)
async def test_a_hostile_body_is_an_error_that_says_so(path):
    async with TestBed() as bed:
        bed.every(Script())
        answers = {}
        for field in FIELDS:
            for value in (*TEXTS, *OTHERS):
                raw = json.dumps({**usual(path), field: value}).encode()
                answers[f"{field}: {str(value)[:20]!r}"] = (await bed.ask(raw, path)).status
        for raw in RAW:
            answers[repr(raw[:30])] = (await bed.ask(raw, path)).status
        for method in ("GET", "PUT", "\x00"):
            answers[method] = (await bed.ask(b"", path, method=method)).status
        checked(answers)


@pytest.mark.parametrize("path", PATHS)
async def test_a_hostile_address_is_not_found(path):
    async with TestBed() as bed:
        for method in ("GET", "POST"):
            answer = await bed.ask(b"", path, method=method)
            assert answer.status in (404, 405), answer.body
            assert answer.error["message"]


@pytest.mark.parametrize("headers", HEADERS)
@pytest.mark.parametrize("path", SERVED)
async def test_a_hostile_header_is_no_defect(path, headers):
    async with TestBed() as bed:
        bed.every(Script())
        method = "GET" if path == "/v1/models" else "POST"
        client = Client(bed.app, path, json.dumps(usual(path)).encode(), headers, method)
        answer = await client.done()
        assert 200 <= answer.status < 500, answer.body


async def test_what_is_recorded_of_a_hostile_request_can_be_stored():
    from controller.services.records.requests import _row

    async with TestBed() as bed:
        bed.every(Script())
        for field, value in (("workflow_id", f"w{NUL}1"), ("stage", NUL)):
            answer = await bed.ask(completion(metadata={"workflow_id": "w", field: value}))
            assert (answer.status, answer.error["param"]) == (400, f"metadata.{field}")
        assert (await bed.ask(completion(metadata={"note": NUL}, request_id=NUL))).status == 200
        (record,) = bed.sink.records
        assert not any(NUL in value for value in _row(record) if isinstance(value, str))
