"""Static files over ASGI: revalidation, compression, and nothing outside the finders' folders."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest

from console.static_files import StaticFiles
from console.vendor import SERVED, TESTS_ONLY

static = StaticFiles("/static/")


async def get(path, method="GET", **headers):
    sent = []

    async def send(message):
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await static({"type": "http", "method": method, "path": path, "headers": raw}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


async def test_a_file_comes_with_its_type_and_tag():
    status, headers, body = await get("/static/css/tokens.css")
    assert (status, headers[b"content-type"]) == (200, b"text/css; charset=utf-8")
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert b"--accent" in body
    assert int(headers[b"content-length"]) == len(body)


async def test_a_known_version_is_not_sent_again():
    _, headers, _ = await get("/static/css/tokens.css")
    status, _, body = await get("/static/css/tokens.css", if_none_match=headers[b"etag"].decode())
    assert (status, body) == (304, b"")


async def test_large_text_is_compressed_for_those_who_ask():
    _, plain_headers, plain = await get("/static/vendor/plotly-basic.min.js")
    _, headers, packed = await get("/static/vendor/plotly-basic.min.js", accept_encoding="gzip, br")
    assert headers[b"content-encoding"] == b"gzip"
    assert b"content-encoding" not in plain_headers
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 2


async def test_head_says_the_length_and_sends_nothing():
    status, headers, body = await get("/static/js/live.js", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers[b"content-length"]) > 1000


@pytest.mark.parametrize(
    "path", ["/static/", "/static/css", "/static/nothing.js", "/static/../console/settings.py", "/static//etc/passwd"]
)
async def test_what_is_not_a_static_file_is_not_found(path):
    assert (await get(path))[0] == 404


async def test_writing_is_not_allowed():
    assert (await get("/static/js/live.js", method="POST"))[0] == 405


@pytest.mark.parametrize("folder", [SERVED, TESTS_ONLY])
def test_vendored_files_are_those_that_were_fetched(folder):
    listed = re.findall(r"^  (\S+)  sha256 ([0-9a-f]{64})$", (folder / "VERSIONS.txt").read_text(), re.MULTILINE)
    found = {path.name for path in folder.iterdir()} - {"VERSIONS.txt"}
    assert {name for name, _ in listed} == found
    for name, digest in listed:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
