"""Runtime environments of a real cluster: what one sets up reaches the engine, and one that fails is told in words."""

from __future__ import annotations

import pytest

from tests.ray.fleet import READY_S, template
from workers.supervisor.plan import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.db]


def put(fleet, name, **runtime_env):
    """The template of the other tests, without the folder in which Python finds the engine."""
    spec = {"resources": {"device": 1}, "runtime_env": runtime_env}
    fleet.call(f"launch-templates/by-name/{name}", {**template(), "environment": {}, "spec": spec}, "PUT")


def test_what_is_set_up_reaches_the_engine(fleet, cluster, figures):
    put(fleet, "reference-in-an-environment", env_vars={"PYTHONPATH": str(ROOT)}, working_dir=f"local://{ROOT}")
    fleet.start("in-an-environment", template="reference-in-an-environment")
    took_s = fleet.system.until(lambda: fleet.ready() == ["in-an-environment"], READY_S)
    figures["start_in_environment_s"] = round(took_s, 1)


@pytest.mark.thorough
def test_one_that_cannot_be_set_up_is_told(fleet, cluster):
    put(fleet, "reference-of-nothing", working_dir="local:///there/is/no/such/folder")
    fleet.start("of-nothing", template="reference-of-nothing")
    fleet.system.until(lambda: fleet.column("observed_state", "of-nothing") == "failed", READY_S)
    assert cluster.jobs()["of-nothing"] == "FAILED"
    told = fleet.column("error", "of-nothing")
    assert told.startswith("its runtime environment could not be set up on the node: ")
    assert "/there/is/no/such/folder" in told
    assert len(told) < 600
