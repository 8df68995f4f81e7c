"""Which clusters a worker asks, from its settings and the rows of instances."""

import time

import pytest

from controller.core.errors import ConfigError
from controller.models import Instance, LaunchTemplate
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_stop
from controller.services.fleet.lifecycle import instance_start
from tests import factories
from tests.workers.ray.fake_cluster import FakeCluster
from workers.provisioners import RayProvisioner, sources
from workers.ray.jobs import ClusterUnreachable
from workers.tasks.reconcile import reconcile_once

pytestmark = pytest.mark.usefixtures("db")


@pytest.fixture
def west(db):
    command, spec = ["vllm", "serve", "--port", "${port}"], {"resources": {"GPU": 1}, "cluster": "west"}
    template = LaunchTemplate.objects.create(name="t", backend="vllm", roles=["collocated"], command=command, spec=spec)
    return instance_create(actor=SYSTEM, id="r1", model=factories.served_model(), provisioner="ray", template=template)


def test_each_cluster_has_its_own_instances(settings, tmp_path, west):
    settings.RAY_ADDRESS, settings.FLEET_TOKEN = "east=http://127.0.0.1:9,west=http://127.0.0.1:9", "token"
    found = sources(tmp_path, only="ray/west")
    assert sorted(found) == ["ray/east", "ray/west"]
    assert [list(found[name].rows) for name in sorted(found)] == [[], ["r1"]]
    assert isinstance(found["ray/west"], RayProvisioner)
    assert found["ray/west"].rows["r1"].wanted
    instance_stop(actor=SYSTEM, instance_id="r1")
    assert not sources(tmp_path)["ray/west"].rows["r1"].wanted
    assert instance_start(instance_id="r1")["placement"] == {"resources": {"GPU": 1}, "cluster": "west"}


@pytest.mark.parametrize(
    ("address", "token", "told"),
    [("", "token", "RAY_ADDRESS of this worker does not name the cluster"), ("west=http://h:1", "", "FLEET_TOKEN")],
)
def test_a_cluster_that_cannot_be_asked_is_away(settings, tmp_path, west, address, token, told):
    settings.RAY_ADDRESS, settings.FLEET_TOKEN = address, token
    away = sources(tmp_path)["ray/west"]
    with pytest.raises(ClusterUnreachable, match=told):
        away.observe()
    with pytest.raises(ConfigError, match=told):
        away.start("r1", {})


def test_without_clusters_there_is_nothing_to_look_at(settings, tmp_path, db):
    settings.RAY_ADDRESS = ""
    assert not [name for name in sources(tmp_path) if name.startswith("ray")]


def test_a_template_whose_jobs_the_cluster_refuses_waits_for_a_person(settings, tmp_path, west):
    fake = FakeCluster()
    fake.refuses = "TypeError: runtime_env['pip'] must be of type list"
    settings.RAY_ADDRESS, settings.FLEET_TOKEN = f"west={fake.url}", "token"
    try:
        for _ in range(12):
            reconcile_once(sources(tmp_path), time.time())
            for row in Instance.objects.filter(desired_state="running"):  # without the pause before its start
                row.spec.pop("start_after", None)
                row.save()
    finally:
        fake.close()
    assert len(fake.submitted) == 3
    assert [row.observed_state for row in Instance.objects.all()] == ["failed"] * 3
    paused = LaunchTemplate.objects.get()
    assert paused.paused_reason.endswith(f"refused the job: {fake.refuses}")
