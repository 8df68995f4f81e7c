"""The data path as everybody who may reach it: bodies of all shapes, with a tenant's key, with others and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.openai.protocol.errors import KINDS
from tests.api.openai.gateways import KEY, Client, TestBed, key_config, snapshot
from tests.fuzz import tally
from tests.fuzz.targets import LOOP

pytestmark = pytest.mark.fuzz
EACH = 100 * tally.SCALE
READS = "sk-reads-alone"
ROLES = {
    "tenant_key": KEY,
    "key_without_the_scope": READS,
    "service_token": "slsa_" + "a" * 43,
    "guess": "sk-guess",
    "nobody": "",
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/demo", "/v1/embeddings",
         "/v1/responses/r", "/v1/audio/speech", "/v1/", "/healthz", "/livez", "/metrics")  # fmt: skip
WORDS = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "demo", "gpt", "chat", "\x00", "\ud800", "😀", "a" * 5000])
)
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**63, 1e308, 10**40]))
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KNOWN = ("model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream",
         "stream_options", "n", "best_of", "temperature", "top_p", "stop", "logprobs", "logit_bias", "user", "metadata",
         "tools", "tool_choice", "response_format", "instructions", "text", "reasoning", "priority", "cache_salt",
         "vllm_xargs", "kv_transfer_params", "rid", "echo", "suffix", "seed", "store", "background", "slo",
         "thinking_deadline")  # fmt: skip
RIGHT = (
    {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 2},
    {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    {"model": "demo", "input": "hello", "max_output_tokens": 2},
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A right body with fields that are not, or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    body: dict[str, Any] = dict(draw(st.sampled_from(RIGHT)))
    for name in draw(st.lists(st.sampled_from(KNOWN), max_size=4)):
        body[name] = draw(JSON)
    raw = json.dumps(body).encode()
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


@pytest.fixture(scope="module")
def bed() -> Iterator[TestBed]:
    async def start() -> TestBed:
        keys = (key_config(), key_config(READS, id=2, scopes=("read",)))
        return await TestBed(snapshot(keys=keys)).__aenter__()

    made = LOOP.run_until_complete(start())
    yield made
    LOOP.run_until_complete(made.__aexit__())


NAMES = (b"x-slo-class", b"x-request-id", b"content-type", b"accept-encoding", b"traceparent", b"content-encoding")
HEADERS = st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=20)), max_size=2)


@pytest.mark.parametrize("role", ROLES)
def test_every_answer_is_one_of_ours(role: str, bed: TestBed) -> None:
    before = {kind: len(each) for kind, each in tally.FAULTS.items()}
    statuses: set[int] = set()

    @settings(
        max_examples=EACH * 4 if role == "tenant_key" else EACH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=tally.QUICK,
    )
    @given(bodies(), st.sampled_from(PATHS), st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE"]), HEADERS)
    def each(body: bytes, path: str, method: str, more: list[tuple[bytes, bytes]]) -> None:
        tally.tried("data path", role)
        statuses.add(LOOP.run_until_complete(call(bed, role, body, path, method, more)))

    each()
    if role == "tenant_key":
        assert 200 in statuses
    assert {kind: tally.faults_of(kind, since) for kind, since in before.items()} == {kind: [] for kind in before}


async def call(bed: TestBed, role: str, body: bytes, path: str, method: str, more: list[tuple[bytes, bytes]]) -> int:
    key = [(b"authorization", f"Bearer {ROLES[role]}".encode())] if ROLES[role] else []
    what = f"{role}: {method} {path} {body[:200]!r} {more}"
    client = Client(bed.app, path, body, [*key, *more], method)
    try:
        await asyncio.wait_for(client.task, 20)
    except Exception as error:
        tally.fault("crashes", f"{what}: {error!r}")
        return 0
    judge(client, role, path, what)
    return client.answer.status


def judge(client: Client, role: str, path: str, what: str) -> None:
    answer = client.answer
    if answer.status >= 500 and answer.status not in (502, 503, 504):
        tally.fault("server_errors", f"{answer.status} {what}: {answer.body[:200]!r}")
    elif answer.status >= 400 and path.startswith("/v1/"):
        try:
            error = answer.error
            fine = KINDS[error["code"]].status == answer.status and set(error) == {"message", "type", "param", "code"}
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            tally.fault("undocumented", f"{answer.status} {what}: {answer.body[:200]!r}")
    elif answer.status != 200 and path.startswith("/v1/"):
        tally.fault("undocumented", f"{answer.status} {what}")
    elif path.startswith("/v1/") and role not in ("tenant_key", "key_without_the_scope"):
        tally.fault("undocumented", f"served without a key: {what}: {answer.body[:200]!r}")
