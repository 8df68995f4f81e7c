"""A scale-out from the warm pool, from the decision to the first token, with the worker killed while weights load."""

import pytest
import requests

from tests.faults.load import Load, recorded
from workers.http.fleet_proof import made_key

pytestmark = [pytest.mark.db, pytest.mark.slow]

ENGINE_S, DISK_S = 3.0, 9.0  # emulated loads
LATE_S = 6.0  # looks of scaler and worker, a killed worker's way back, the gateway's telemetry, and a queue to empty


@pytest.fixture
def warm_pool(system):
    """One warm instance, ready; given up at the end, and the loads that were emulated with it."""
    spec = f'{{"emulated_load_s": "engine={ENGINE_S},host={DISK_S},disk={DISK_S}"}}'
    run(system, "UPDATE instance SET spec = spec || %s::jsonb WHERE desired_state = 'running'", spec)
    keep(system, 1)
    system.until(lambda: warm(system), within_s=60.0)
    yield warm(system)[0]
    keep(system, 0)
    system.until(lambda: not warm(system), within_s=60.0)
    run(system, "UPDATE instance SET spec = spec - 'emulated_load_s' WHERE desired_state = 'running'")


def run(system, sql, *values):
    system.query(f"{sql} RETURNING 1", *values)


def keep(system, warm):
    session = system.sign_in()
    (policy,) = session.get(f"{system.console}/api/v1/scaling-policies", timeout=10).json()["items"]
    change = {"warm": warm, "version": policy["version"]}
    answer = system.control(session, f"scaling-policies/{policy['id']}", change, "PATCH")
    assert answer.status_code == 200, answer.text


def warm(system):
    sql = "SELECT id FROM instance WHERE weights = 'absent' AND desired_state = 'running' AND observed_state = 'ready'"
    return [id for (id,) in system.query(sql)]


def decided(system, kind, subject_like, before):
    sql = "SELECT outcome, inputs, at FROM decision WHERE kind = %s AND subject LIKE %s AND id > %s"
    return system.query(sql, kind, subject_like, before)


def test_from_the_decision_to_the_first_token(system, say, warm_pool):
    [(before,)] = system.query("SELECT coalesce(max(id), 0) FROM decision")
    assert warm_pool not in system.gateway_health()["instances"]
    with Load(system, rate=30, body={"max_tokens": 60, "slo_class": "batch"}, words=300) as load:
        [(url,)] = system.query("SELECT url FROM instance WHERE id = %s", warm_pool)
        key = made_key((system.folder / "fleet_token").read_text().strip(), warm_pool)
        ask = {"headers": {"Authorization": f"Bearer {key}"}, "timeout": 5}
        loads = lambda: requests.get(f"{url}/weights", **ask).json()["state"] == "loading"  # noqa: E731
        system.until(loads, within_s=45.0)
        system.kill("worker")
        system.until(lambda: decided(system, "weights_load", warm_pool, before), within_s=45.0)
        system.until(lambda: load.served(warm_pool) > 0)
    assert set(load.ends()) <= {"done", "504 waiting_time_exceeded"}, load.ends()
    recorded(system, load.sent)
    system.until(lambda: decided(system, "scale_out_served", "demo/%", before), within_s=60.0)
    ((outcome, inputs, _),) = decided(system, "weights_load", warm_pool, before)
    assert (outcome["source"], inputs["tries"]) == ("engine", 1)
    assert ENGINE_S - 0.1 < outcome["load_s"] < ENGINE_S + 1
    served = [
        row[0] for row in decided(system, "scale_out_served", "demo/%", before) if row[1]["instance"] == warm_pool
    ]
    assert ENGINE_S - 0.1 < served[0]["first_served_s"] < ENGINE_S + LATE_S
    say(load_s=outcome["load_s"], first_served_s=served[0]["first_served_s"], ends=dict(load.ends()))
