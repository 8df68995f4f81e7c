"""A model with a policy and two running instances, and a provisioner that does what the test says."""

import time

import pytest

from controller.models import Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_observe
from controller.services.fleet.scaling_policies import scaling_policy_create
from controller.services.fleet.served_models import served_model_create
from workers.provisioners import Observed
from workers.tasks import heartbeat, reconcile
from workers.tasks.reconcile import reconcile_once


class FakeProvisioner:
    """Keeps what it was told; `seen` is what it observes, by id."""

    def __init__(self):
        self.seen, self.started, self.stopped = {}, {}, []

    def observe(self):
        return list(self.seen.values())

    def start(self, id, spec):
        self.started[id] = dict(spec)
        self.seen.setdefault(id, Observed(id, "starting"))

    def stop(self, id, grace_s):
        self.stopped.append(id)
        self.seen.pop(id, None)

    def becomes(self, id, state, **fields):
        url = f"http://127.0.0.1:{9000 + sum(map(ord, id))}"
        self.seen[id] = Observed(id, state, **{"url": url, "started_at": time.time(), **fields})


@pytest.fixture
def fake():
    return FakeProvisioner()


@pytest.fixture
def policy(db):
    model = served_model_create(actor=SYSTEM, name="mid")
    return scaling_policy_create(actor=SYSTEM, model=model, min_instances=1, max_instances=4, sustain_s=0, cooldown_s=0)


@pytest.fixture
def two(policy):
    """Ids of two instances that are ready."""
    for number in (1, 2):
        row = instance_create(
            actor=SYSTEM, id=f"e{number}", model=policy.model, spec={"profile": "constant:5ms", "seed": number}
        )
        instance_observe(instance_id=row.pk, observed_state=Instance.Observed.READY, url=f"http://h:{number}")
    return ["e1", "e2"]


@pytest.fixture(autouse=True)
def fresh_heartbeat_client():
    heartbeat.redis_client.cache_clear()
    yield
    heartbeat.redis_client.cache_clear()


@pytest.fixture
def look(fake, monkeypatch):
    """One look of the reconciler; `look.fleet` is what gateways publish."""

    def run(times=1):
        for _ in range(times):
            steps = reconcile_once({"process": fake, "static": type(fake)()}, time.time())
        return steps

    run.fleet = []
    monkeypatch.setattr(reconcile, "fleet_or_nothing", lambda: run.fleet)
    return run


@pytest.fixture
def one(policy):
    return instance_create(actor=SYSTEM, id="e1", model=policy.model, max_num_seqs=5, spec={"profile": "constant:5ms"})
