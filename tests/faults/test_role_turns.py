"""Demand that diverges turns engines from one stage to the other and back, under load, through `make up`.

Gateway, beat and scaler are the real ones. The four reference engines run outside and are registered, so the scaler can
start none: what a stage lacks the other has to give.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import requests

from tests.faults.load import Load, recorded
from tests.workers.engine.process import EngineProcess

pytestmark = [pytest.mark.db, pytest.mark.slow]

MODEL = "turning"
ROLES = {"turn-p1": "prefill", "turn-p2": "prefill", "turn-d1": "decode", "turn-d2": "decode"}
SLOTS = 8
ENGINE = (
    *("--profile", "constant:40ms", "--model", MODEL, "--max-model-len", "2048", "--max-num-seqs", str(SLOTS)),
    *("--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--shutdown-timeout", "0"),
    *("--kv-layers", "2", "--kv-token-bytes", "256"),
)
POLICY = {"min_instances": 1, "max_instances": 3, "upper": 0.8, "lower": 0.05, "sustain_s": 2.0, "cooldown_s": 2.0}
TURNS_S = 25.0  # from the first request of the other kind to the turn: the queue, two ticks, the pause before
BODY = {"model": MODEL, "slo_class": "batch", "ignore_eos": True}


@pytest.fixture
def registered_engines(system):
    """Registered with a policy for each stage; stopped and ended afterwards."""
    session, token = system.sign_in(), (system.folder / "fleet_token").read_text().strip()

    def ask(path, body, method="POST", status=201):
        answer = system.control(session, path, body, method)
        assert answer.status_code == status, answer.text
        return answer.json()

    def gone(path):
        assert system.control(session, path, {}, "DELETE").status_code == 204

    with ExitStack() as stack:
        ask("models", {"name": MODEL, "context_tokens": 2048})
        for name, role in ROLES.items():
            engine = stack.enter_context(EngineProcess(*ENGINE, "--role", role, token=token))
            row = {"id": name, "model": MODEL, "role": role, "url": engine.url, "max_num_seqs": SLOTS}
            ask("instances", {**row, "backend": "reference", "provisioner": "static"})
            stack.callback(ask, f"instances/{name}/stop", {}, status=200)
        system.until(lambda: {name: system.instances().get(name) for name in ROLES} == dict.fromkeys(ROLES, "ready"))
        system.until(lambda: ROLES.keys() <= set(system.gateway_health()["instances"]))
        for role in ("prefill", "decode"):
            policy = ask("scaling-policies", {"model": MODEL, "role": role, **POLICY})
            stack.callback(gone, f"scaling-policies/{policy['id']}")
        yield


def roles(system):
    return dict(system.query("SELECT id, role FROM instance WHERE id = ANY(%s)", list(ROLES)))


def batching(system, name):
    """How the running engine batches."""
    [(url,)] = system.query("SELECT url FROM instance WHERE id = %s", name)
    return requests.get(f"{url}/server_info", timeout=10).json()["batching"]


def turned(system):
    """What the scaler said of each turn, oldest first: the stage that gave, the reason, the figures."""
    sql = (
        "SELECT actor, subject, reason, inputs FROM decision WHERE kind = 'role_change' AND subject LIKE %s ORDER BY id"
    )
    return system.query(sql, f"{MODEL}/%")


def overloaded(load):
    """None: without a bound, for something arrives and nothing is done yet."""
    return load is None or load > POLICY["upper"]


def moved_from(system, name):
    """KV transfers that came to their end from it."""
    [(count,)] = system.query("SELECT count(*) FROM kv_transfer WHERE source = %s AND outcome = 'done'", name)
    return count


def test_engines_follow_the_demand_from_stage_to_stage_and_back(system, say, registered_engines):
    with Load(system, rate=2, body={**BODY, "max_tokens": 10}, words=20) as steady:
        system.until(lambda: steady.ends()["done"] > 2)
        began = time.monotonic()
        with Load(system, rate=5, body={**BODY, "max_tokens": 100}, words=20) as answers:
            system.until(lambda: turned(system), TURNS_S)
            to_decode_s = time.monotonic() - began
            [(actor, subject, reason, first)] = turned(system)
            assert (actor, subject, reason) == ("scaler", f"{MODEL}/prefill", "demand_diverged"), first
            assert (first["from"], first["to"], first["ready"]) == ("prefill", "decode", 2)
            assert overloaded(first["wanting_load"])
            assert 2 * first["load"] <= POLICY["upper"]
            system.until(lambda: roles(system) == {**ROLES, first["instance"]: "decode"}, TURNS_S)
            assert batching(system, first["instance"]) == "kairos_decode"
            system.until(lambda: answers.served(first["instance"]) > 0)
        began = time.monotonic()
        with Load(system, rate=30, body={**BODY, "max_tokens": 2}, words=450) as prompts:  # a step each
            system.until(lambda: len(turned(system)) > 1, TURNS_S)
            to_prefill_s = time.monotonic() - began
            _, (actor, subject, reason, second), *_ = turned(system)
            assert (actor, subject, reason) == ("scaler", f"{MODEL}/decode", "demand_diverged"), second
            assert (second["from"], second["to"], second["ready"]) == ("decode", "prefill", 3)
            assert overloaded(second["wanting_load"])
            before = moved_from(system, second["instance"])
            system.until(lambda: moved_from(system, second["instance"]) > before, TURNS_S)
            assert batching(system, second["instance"]) == "slo_aware_batching"
    sent = [*steady.sent, *answers.sent, *prompts.sent]
    assert {each.ended for each in sent} == {"done"}, (steady.ends(), answers.ends(), prompts.ends())
    recorded(system, sent)
    sql = "SELECT subject, outcome->'switched' FROM decision WHERE kind = 'scale_out' AND subject LIKE %s ORDER BY id"
    assert system.query(sql, f"{MODEL}/%")[:2] == [
        (f"{MODEL}/decode", {"instance": first["instance"], "from": "prefill"}),
        (f"{MODEL}/prefill", {"instance": second["instance"], "from": "decode"}),
    ]
    say(first=first, second=second)
    say(requests=len(sent), to_decode_s=round(to_decode_s, 2), to_prefill_s=round(to_prefill_s, 2))
