"""A real vLLM from a launch template, a second one that the scaler starts under load, and the drain after it.

It takes three minutes, so `.ci/run` leaves it out: `make test-vllm` runs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from benchmarks.engines import CONTEXT_TOKENS, VLLM_ENVIRONMENT, VLLM_HOME, vllm_missing
from controller.engine.shipped_templates import SHIPPED
from tests.faults.load import Load, recorded
from tests.faults.system import System, running_system
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

pytestmark = [pytest.mark.vllm, pytest.mark.db]

MODEL = VLLM_HOME / "model"
START_S = 400.0  # on a busy machine
SLOTS = 4  # so few that a small load fills them
TEMPLATE = {
    "backend": "vllm", "key_variable": "VLLM_API_KEY", "start_limit_s": START_S,
    "command": [*SHIPPED["vllm"]["command"], "--enforce-eager", "--dtype", "bfloat16"],
    "environment": {**VLLM_ENVIRONMENT},
}  # fmt: skip
BODY = {
    "model": MODEL.name, "max_tokens": 40, "ignore_eos": True, "target_ttft": 3.0, "target_tbt": 0.5,
    "waiting_time": 60.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def system(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    with running_system(postgres.url, redis_server.url) as made:
        yield made


def put(system: System, session: requests.Session, path: str, body: dict[str, Any], method: str = "POST") -> None:
    answer = system.control(session, path, body, method)
    assert answer.status_code == 201, answer.text


def instances(system: System, state: str = "running") -> dict[str, str]:
    """Observed states of the model's instances by id."""
    sql = """SELECT i.id, i.observed_state FROM instance i JOIN served_model m ON m.id = i.model_id
             WHERE m.name = %s AND i.desired_state = %s"""
    return dict(system.query(sql, MODEL.name, state))


def decisions(system: System, kind: str) -> list[tuple[Any, ...]]:
    sql = "SELECT at, reason, inputs, outcome FROM decision WHERE kind = %s AND subject LIKE %s ORDER BY id"
    return system.query(sql, kind, f"{MODEL.name}/%")


def attained(system: System, sent: list[Any]) -> float:
    [(share,)] = system.query(
        "SELECT avg(attained::int)::float FROM request_record WHERE id = ANY(%s)", [each.id for each in sent]
    )
    return round(share, 3)


def test_a_second_vllm_starts_under_load_and_is_drained_after_it(system, capsys):
    session = system.sign_in()
    put(system, session, "launch-templates/by-name/vllm-eager", TEMPLATE, "PUT")
    put(system, session, "models", {"name": MODEL.name, "context_tokens": CONTEXT_TOKENS})
    first = {
        "id": "first", "model": MODEL.name, "backend": "vllm", "provisioner": "process", "template": "vllm-eager",
        "max_num_seqs": SLOTS, "spec": {"folder": str(MODEL)},
    }  # fmt: skip
    began = time.monotonic()
    put(system, session, "instances", first)
    system.until(lambda: instances(system) == {"first": "ready"}, START_S)
    first_s = time.monotonic() - began
    policy = {
        "model": MODEL.name, "max_instances": 2, "upper": 0.6, "sustain_s": 3.0, "cooldown_s": 3.0, "warm": 0,
    }  # fmt: skip
    put(system, session, "scaling-policies", policy)
    with Load(system, rate=1, body=BODY) as before:
        system.until(lambda: before.served("first") >= 5, 60.0)
    with Load(system, rate=4, body=BODY) as during:
        system.until(lambda: decisions(system, "scale_out_served"), START_S)
        served_at = time.monotonic()
        system.until(lambda: time.monotonic() > served_at + 10.0, 20.0)  # both serve
    with Load(system, rate=1, body=BODY) as after:
        system.until(lambda: len(instances(system)) == 1, 240.0)  # the load is low for as long as a start takes
        system.until(lambda: list(instances(system, "stopped").values()) == ["stopped"], 60.0)
    sent = [*before.sent, *during.sent, *after.sent]
    lost = [each.ended for each in sent if each.ended != "done"]
    recorded(system, sent)
    [(decided_at, reason, _, outcome)] = decisions(system, "scale_out")
    [second] = outcome["started"]
    [(_, _, served, first_token)] = decisions(system, "scale_out_served")
    assert (served["instance"], reason) == (second, "load_above_upper")
    [(steps,)] = system.query("SELECT start_steps FROM instance WHERE id = %s", second)
    by_step = {name: round(at - decided_at.timestamp(), 2) for name, at in steps.items()}
    assert {"process", "weights", "listening", "ready"} <= set(by_step)
    later = [each for each in during.sent if each.at >= served_at]
    figures = {
        "first_ready_s": round(first_s, 1),
        "scale_out_s": {**by_step, "first_token": first_token["first_served_s"]},
        "lost": len(lost),
        "attainment": {
            "before": attained(system, before.sent),
            "during": attained(system, during.sent),
            "with_both": attained(system, later),
            "after": attained(system, after.sent),
        },
        "requests": len(sent),
    }
    with capsys.disabled():
        print("\n" + json.dumps(figures))
    assert lost == []
    assert {each.instance for each in later} == {"first", second}
    [(_, reason, seen, _)] = decisions(system, "scale_in")
    assert reason == "load_below_lower"
    assert seen["low_for_s"] >= seen["start_s"] > policy["sustain_s"], "what a start takes was learned"
