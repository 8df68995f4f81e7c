"""The provisioners' benchmark: each instance becomes ready through its provisioner, and a hanging cluster is told."""

from __future__ import annotations

import pytest

from benchmarks.provision import rounds
from controller.models import Instance, ProvisionerLook


@pytest.fixture(autouse=True)
def _no_gateways(monkeypatch):
    """Other tests leave what gateways publish in the Redis that all share."""
    monkeypatch.setattr("workers.tasks.reconcile.fleet_or_nothing", lambda: [])


@pytest.mark.django_db(transaction=True)
def test_a_small_fleet_is_started_looked_at_and_told_stale(tmp_path):
    found = rounds.measure(tmp_path, instances=9, looks=2, freezes=1)
    assert list(Instance.objects.order_by("provisioner").values_list("provisioner", "observed_state")) == [
        *[("process", "ready")] * 3,
        *[("ray", "ready")] * 3,
        *[("static", "ready")] * 3,
    ]
    assert (found["orders"], found["instances"]) == (6, 9), "registered endpoints need no start"
    assert 0 < found["observe_ms"] <= found["observe_max_ms"]
    assert found["orders_per_s"] > 0
    assert 0 < found["stale_s"] < rounds.AWAY_S
    assert ProvisionerLook.objects.get(name="ray/default").instances == 3


@pytest.mark.django_db(transaction=True)
def test_an_instance_that_is_never_ready_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "ROUNDS_MAX", 1)
    monkeypatch.setattr(rounds, "supervise", lambda engines: None)
    with pytest.raises(RuntimeError, match=r"of 3 instances are ready after 1 rounds"):
        rounds.measure(tmp_path, instances=3, looks=1, freezes=0)
