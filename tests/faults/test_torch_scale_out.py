"""A recorded scale-out of a real model, from the scaler's decision to the first token at a client, through `make up`.

Once from a new process and once from the warm pool; prints what was recorded. Figures on a busy machine say little.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.faults.load import Load

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.torch, pytest.mark.long(110)]
WITHIN_S = 180.0
POLICY = {"min_instances": 1, "max_instances": 2, "upper": 0.6, "lower": 0.05, "sustain_s": 600.0, "cooldown_s": 2.0}


@pytest.fixture(scope="module")
def folder():
    from workers.engine.torch.model.random import main

    path = Path(tempfile.mkdtemp(prefix="slackline-model-"))
    sizes = ("--layers", "4", "--hidden", "512", "--heads", "8", "--kv-heads", "4", "--vocabulary", "4096")
    main([str(path), *sizes, "--context", "2048"])
    yield path
    shutil.rmtree(path)


@pytest.fixture
def tiny(system, folder):
    """A served model of its own with one engine and a policy; at the end the policy is gone and nothing runs."""
    session, name = system.sign_in(), f"tiny-{len(system.query('SELECT 1 FROM served_model'))}"

    def ask(path, body, method="POST", status=201):
        answer = system.control(session, path, body, method)
        assert answer.status_code == status, answer.text
        return answer.json()

    spec = {"executor": "torch", "folder": str(folder), "threads": 1, "kv_cache_gib": 0.05, "max_model_len": 2048}
    ask("models", {"name": name, "context_tokens": 2048})
    first = {"id": f"{name}-a", "model": name, "backend": "reference", "provisioner": "process", "max_num_seqs": 2}
    ask("instances", {**first, "spec": spec})
    system.until(lambda: system.instances().get(f"{name}-a") == "ready", WITHIN_S)
    policy = ask("scaling-policies", {"model": name, **POLICY})

    def keep(**changes):
        nonlocal policy
        policy = ask(f"scaling-policies/{policy['id']}", {**changes, "version": policy["version"]}, "PATCH", 200)

    yield name, keep
    assert system.control(session, f"scaling-policies/{policy['id']}", {}, "DELETE").status_code == 204
    mine = "SELECT i.id FROM instance i JOIN served_model m ON m.id = i.model_id WHERE m.name = %s"
    for (id,) in system.query(f"{mine} AND desired_state = 'running'", name):
        ask(f"instances/{id}/stop", {}, status=200)
    system.until(lambda: not system.query(f"{mine} AND observed_state NOT IN ('stopped', 'failed')", name), 60.0)


def decisions(system, kind, name, field="subject"):
    sql = f"SELECT outcome, inputs, id, at FROM decision WHERE kind = %s AND {field} LIKE %s ORDER BY id"
    return system.query(sql, kind, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("warm", [0, 1])
def test_from_the_decision_to_the_first_token(system, say, tiny, warm):
    name, keep = tiny
    if warm:
        keep(warm=1)
        ready = "SELECT 1 FROM instance WHERE weights = 'absent' AND observed_state = 'ready' AND id <> %s"
        system.until(lambda: system.query(ready, f"{name}-a"), WITHIN_S)
    body = {"model": name, "max_tokens": 200, "ignore_eos": True, "slo_class": "batch", "waiting_time": 20}
    with Load(system, rate=6, body=body, words=60) as load:
        system.until(lambda: decisions(system, "scale_out_served", f"{name}/%"), WITHIN_S)
    ((out, _, scale_out, decided_at),) = decisions(system, "scale_out", f"{name}/%")
    ((served, inputs, _, _),) = decisions(system, "scale_out_served", f"{name}/%")
    (new,) = out["started"]
    assert (inputs["instance"], inputs["scale_out"], "warm" in out) == (new, scale_out, bool(warm))
    ((loaded, _, _, _),) = decisions(system, "weights_load", new)
    assert (served["source"], served["from"], loaded["attempts"][0]["error"]) == ("engine", f"{name}-a", "")
    assert 0 < served["load_s"] < served["first_served_s"]
    sql = "SELECT count(*) FROM request_record WHERE instance = %s AND ttft_s IS NOT NULL"
    assert system.query(sql, new)[0][0] > 0
    figures = {
        "scale_out": "warm engine" if warm else "new process",
        "decided_at": decided_at.isoformat(),
        "weights_from": served["from"],
        "load_s": served["load_s"],
        "bytes": served["bytes"],
        "first_served_s": served["first_served_s"],
        "ends": dict(load.ends()),
    }
    say(recorded=json.dumps(figures))
