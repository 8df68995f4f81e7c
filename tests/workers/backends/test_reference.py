"""What a request was promised travels from the gateway to the reference engine's scheduler, and to no other engine."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from api.openai.in_flight import InFlightRequest
from controller.core.types import InstanceSpec, Request, Targets
from controller.policies.batching.kairos_slack import as_prompt, relative_slack
from tests.workers.engine.process import FLEET, EngineProcess
from workers.backends.base import CallTargets, EngineError, Limits, UpstreamCall
from workers.backends.reference import ReferenceBackend
from workers.backends.vllm import VllmBackend
from workers.engine.errors import HttpError
from workers.engine.http.generate import Generator
from workers.engine.http.requests import RequestRules, parse_completion
from workers.engine.text.tokenizer import ChunkTokenizer

NOBODY: Any = None  # no connection is opened
SERVED = RequestRules("demo", 100, ChunkTokenizer())
CALL = UpstreamCall("r1", "/v1/completions", b'{"model":"demo","prompt":[1,2,3],"max_tokens":4', 7, True, False)


def body(call: UpstreamCall, backend: type[VllmBackend] = ReferenceBackend) -> dict[str, Any]:
    return json.loads(backend(InstanceSpec("e", "demo", url="http://e"), NOBODY, Limits()).body_of(call))


def test_the_promise_is_part_of_the_body():
    sent = body(replace(CALL, targets=CallTargets(2.0, 0.05, 0.75, 3.0)))
    assert sent == {
        "model": "demo",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "target_ttft": 2.0,
        "waited": 0.75,
        "target_tbt": 0.05,
        "value": 3.0,
        "priority": 7,
        "request_id": "r1",
    }


def test_what_is_not_promised_is_not_sent():
    assert body(CALL).keys() == body(replace(CALL, targets=CallTargets(math.inf, math.inf, 5.0))).keys()
    assert body(replace(CALL, targets=CallTargets(1e9, 1e9)))["target_ttft"] == 86_400.0


def test_another_engine_is_told_nothing():
    assert "target_ttft" not in body(replace(CALL, targets=CallTargets(2.0, 0.05)), VllmBackend)


def in_flight(sent_at: float, ttft_s: float = 2.0) -> InFlightRequest:
    request = Request("r1", 100.0, Targets(ttft_s, 0.05), 3, 4, value=2.0)
    made = InFlightRequest(request, CALL.head, NOBODY, 0.0, chat=False, streamed=True, keep_usage=False)
    made.sent_at = sent_at
    return made


def sequence(call: UpstreamCall, now: float) -> Any:
    """As the live engine makes it of what it is sent."""
    asked = parse_completion(body(call), {}, SERVED)
    engine: Any = SimpleNamespace(next_id=lambda name: f"{name}-1", now=lambda: now)
    config: Any = SimpleNamespace(seed=0)
    return Generator(engine, config, SERVED)._sequence(asked)


def test_a_gateways_deadline_becomes_the_engines():
    """Sent 0.75 s after it arrived: of the 2 s to its first token 1.25 are left, on the engine's own clock."""
    call = in_flight(100.75).upstream_call(7)
    assert call.targets == CallTargets(2.0, 0.05, 0.75, 2.0)
    seq = sequence(call, 5_000.0)
    assert seq.due == pytest.approx(5_001.25)
    assert (seq.ttft_s, seq.tpot_s, seq.value, seq.priority) == (2.0, 0.05, 2.0, 7)
    late = sequence(in_flight(103.0).upstream_call(7), 5_000.0)
    assert late.due == pytest.approx(4_999.0)


def test_kairos_sees_live_who_is_urgent():
    """Equal prompts that reach the engine together: who waited longer at the gateway has less of its TTFT left."""
    calm, pressed = sequence(in_flight(100.0).upstream_call(7), 50.0), sequence(in_flight(101.9).upstream_call(7), 50.0)
    slack = [relative_slack(as_prompt(seq, seq.prompt_tokens), 50.0) for seq in (calm, pressed)]
    assert slack == pytest.approx([1.0, 0.05])


@pytest.mark.parametrize(("name", "value"), [("waited", -1), ("waited", "soon"), ("value", -2), ("target_tbt", True)])
def test_a_bad_target_is_refused_by_name(name, value):
    with pytest.raises(HttpError) as caught:
        parse_completion({"prompt": [1], name: value}, {}, SERVED)
    assert caught.value.param == name


async def test_it_frees_kv_with_the_fleets_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", token=FLEET["token"]) as engine:
        async with aiohttp.ClientSession() as session:
            backend = ReferenceBackend(InstanceSpec("e", "tiny", url=engine.url), session, Limits(telemetry_s=30.0))
            monkeypatch.setenv("FLEET_TOKEN", "another")
            with pytest.raises(EngineError, match="403"):
                await backend.free_kv(["r"])
            monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
            await backend.free_kv(["r"])
            (tmp_path / "token").write_text(f"{FLEET['token']}\n")
            monkeypatch.setenv("FLEET_TOKEN_FILE", str(tmp_path / "token"))
            monkeypatch.delenv("FLEET_TOKEN")
            await backend.free_kv(["r"])


def dated(deadline_s: float | None = None, workflow_due: float = math.inf, **changes: Any) -> InFlightRequest:
    request = Request("r1", 100.0, Targets(2.0, 0.05, deadline_s), 3, 4, tenant="acme", workflow="w1", **changes)
    made = InFlightRequest(request, CALL.head, NOBODY, 0.0, chat=False, streamed=True, keep_usage=False)
    made.sent_at, made.workflow_due = 101.0, workflow_due
    return made


def test_time_left_and_bounds_become_the_engines_estimate():
    """Sent 1 s after it arrived: of its stage's 5 s 4 are left, of its workflow's 20 s 19."""
    call = dated(5.0, 120.0, least_tokens=2, most_tokens=9).upstream_call(7)
    sent = body(call)
    assert (sent["due_in"], sent["workflow_due_in"], sent["length_lower"], sent["length_upper"]) == (4.0, 19.0, 2, 9)
    estimate = sequence(call, 5_000.0).estimate
    assert (estimate.due, estimate.likely_latest, estimate.latest) == pytest.approx((5_004.0, 5_004.0, 5_019.0))
    assert (estimate.length.lower(0), estimate.length.upper(0)) == (2, 4), "no more than max_tokens"
    assert not estimate.each_token
    assert estimate.program == sent["workflow"] != "w1"


def test_a_decode_stage_hears_what_is_left_when_it_begins():
    made = dated(5.0, 120.0)
    there = body(made.later(made.upstream_call(7), 103.5))
    assert (there["due_in"], there["workflow_due_in"], there["waited"]) == (1.5, 16.5, 3.5)
    assert body(made.later(made.upstream_call(7), 106.0))["due_in"] == -1.0


def test_two_tenants_may_call_their_workflows_the_same():
    ours, theirs = dated(5.0, 120.0), dated(5.0, 120.0)
    theirs.request.tenant = "other"
    assert body(ours.upstream_call(7))["workflow"] != body(theirs.upstream_call(7))["workflow"]


def test_the_engine_hears_of_one_tenant_but_not_its_name():
    ours, theirs = dated(), dated()
    theirs.request.tenant = "other"
    told = [body(each.upstream_call(7))["tenant"] for each in (ours, theirs)]
    assert "acme" not in told
    assert told[0] != told[1]
    assert [sequence(each.upstream_call(7), 0.0).tenant for each in (ours, theirs)] == told
    ours.request.tenant = ""
    assert "tenant" not in body(ours.upstream_call(7))


def test_bounds_alone_earn_each_token_on_time():
    estimate = sequence(dated(least_tokens=1, most_tokens=3).upstream_call(7), 50.0).estimate
    assert estimate.each_token
    assert estimate.latest == pytest.approx(51.0 + 2 * 0.05)


def test_nothing_known_changes_nothing():
    call = in_flight(100.75).upstream_call(7)
    assert not {"due_in", "workflow_due_in", "length_lower", "length_upper", "workflow"} & body(call).keys()
    assert sequence(call, 50.0).estimate is None
    assert "due_in" not in body(dated(5.0).upstream_call(7), VllmBackend)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"due_in": "soon"}, "due_in"),
        ({"due_in": 1e9}, "due_in"),
        ({"workflow_due_in": math.nan}, "workflow_due_in"),
        ({"tenant": "t" * 129}, "tenant"),
        ({"length_lower": 3}, "length_upper"),
        ({"length_upper": 3}, "length_lower"),
        ({"length_lower": 4, "length_upper": 3}, "length_lower"),
        ({"length_lower": -1, "length_upper": 3}, "length_lower"),
        ({"workflow": "w" * 129}, "workflow"),
    ],
)
def test_bad_hints_are_refused_by_name(fields, name):
    with pytest.raises(HttpError) as caught:
        parse_completion({"prompt": [1], **fields}, {}, SERVED)
    assert caught.value.param == name
