"""Devices are held by whatever runs on them: from its creation until it is gone, by one instance at a time."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from controller.models import Decision, Device, Instance, LaunchTemplate
from controller.scale.lifecycle import Replace
from controller.scale.provisioning import DECLARED, Hosts
from controller.selectors.fleet.topology import places, room_for
from controller.services.fleet.instances import (
    instance_create,
    instance_observe,
    instance_register,
    instance_stop,
    instance_update,
)
from controller.services.fleet.lifecycle import instance_replace, instance_start
from controller.services.fleet.scaling_stages import like
from controller.services.fleet.topology import device_create
from tests import factories
from workers.provisioners import PROVISIONERS

pytestmark = pytest.mark.django_db
ACTOR = factories.ACTOR
GONE = Instance.Observed.STOPPED


def machine(devices: int, name: str = "box", kind: str = "a100"):
    host = factories.host(name=name)
    for index in range(devices):
        device_create(actor=ACTOR, host=host, index=index, kind=kind, memory_bytes=1 << 30)
    return host


def new_instance(host, model=None, **fields):
    return instance_create(actor=ACTOR, model=model or factories.served_model(), host=host, **fields)


def held(row) -> list[int]:
    rows = row.holdings.filter(released_at__isnull=True)
    return sorted(rows.values_list("device__index", flat=True))


def free(host) -> int:
    return next(place.free for place in places() if place.host == host)


@pytest.mark.parametrize("provisioner", [name for name in PROVISIONERS if DECLARED[name].hosts != Hosts.CLUSTER])
def test_every_provisioners_instance_holds_its_devices_until_it_is_gone(provisioner):
    host, model = machine(2), factories.served_model()
    if provisioner == "static":
        row = instance_register(actor=ACTOR, id="e1", model=model, url="http://e1:1", host=host, tp=2)
    else:
        row = new_instance(host, model, provisioner=provisioner, tp=2)
    assert held(row) == [0, 1]
    assert (free(host), room_for(row)) == (0, 0)
    with pytest.raises(ValidationError, match="0 of 2 devices free; 1 required"):
        new_instance(host, model, id="second")
    assert not Instance.objects.filter(pk="second").exists()

    instance_stop(actor=ACTOR, instance_id=row.pk)
    assert free(host) == 0, "its process may still run"
    instance_observe(instance_id=row.pk, observed_state=GONE)
    assert (held(row), free(host), room_for(row)) == ([], 2, 1)


def test_devices_of_another_kind_neither_serve_nor_bound():
    host = machine(1)
    assert held(new_instance(host, device_kind="a100")) == [0]
    other = new_instance(host, device_kind="not listed")
    assert (held(other), room_for(other)) == ([], None)


def test_without_a_host_or_devices_there_is_nothing_to_hold():
    bare = factories.host()
    for row in (new_instance(None), new_instance(bare)):
        assert (held(row), room_for(row)) == ([], None)


def test_what_is_made_like_another_gets_devices_of_its_own():
    host, model = machine(2), factories.served_model()
    first = new_instance(host, model)
    second = instance_create(actor=ACTOR, model=model, **like(first))
    assert (held(first), held(second)) == ([0], [1])
    with pytest.raises(ValidationError, match="0 of 2"):
        instance_create(actor=ACTOR, model=model, **like(first))


def test_a_replacement_takes_the_device_of_what_failed():
    host = machine(1)
    row = new_instance(host, device_kind="a100")
    decision = instance_replace(step=Replace(row.pk, "exited", "gone"))
    new = Instance.objects.get(pk=decision.outcome["replacement"])
    assert (held(row), held(new), free(host)) == ([], [0], 0)


def test_what_held_none_is_not_replaced_where_all_are_held():
    host, model = machine(1), factories.served_model()
    older = factories.instance(model, host=host, provisioner="process")
    new_instance(host, model)
    decision = instance_replace(step=Replace(older.pk, "exited", "gone"))
    assert decision.outcome == {"held": "no_device"}
    assert Instance.objects.live().count() == 1
    assert Decision.objects.filter(kind="instance_replaced").count() == 1


def test_what_held_more_than_there_is_for_another_is_not_replaced():
    """The kind of one of its devices was described again since."""
    host = machine(2)
    row = new_instance(host, device_kind="a100", tp=2)
    Device.objects.filter(host=host, index=1).update(kind="h100")
    decision = instance_replace(step=Replace(row.pk, "exited", "gone"))
    assert decision.outcome == {"held": "no_device"}
    assert (free(host), Instance.objects.live().count()) == (2, 0)


def test_moved_to_another_host_it_holds_there():
    here, there = machine(2), machine(1, "other")
    row = new_instance(here)
    same = instance_update(actor=ACTOR, instance_id=row.pk, version=row.version, changes={"host": here})
    assert (same.version, held(row)) == (row.version, [0])
    row = instance_update(actor=ACTOR, instance_id=row.pk, version=row.version, changes={"host": there})
    assert (free(here), free(there)) == (2, 0)
    with pytest.raises(ValidationError, match="1 of 1"):
        instance_update(actor=ACTOR, instance_id=row.pk, version=row.version, changes={"tp": 2})
    assert free(there) == 0, "nothing was freed"


def test_an_engine_on_cuda_is_started_on_the_devices_that_it_holds():
    host, model = machine(4), factories.served_model()
    spec = {"executor": "torch", "folder": "/models/m", "device": "cuda"}
    pair = new_instance(host, model, id="pair", tp=2, spec=spec)
    single = new_instance(host, model, id="single", spec=spec)
    assert [instance_start(instance_id=row.pk)["device_indexes"] for row in (pair, single)] == [[0, 1], [2]]
    instance_observe(instance_id="pair", observed_state=GONE)
    assert instance_start(instance_id=new_instance(host, model, id="next", spec=spec).pk)["device_indexes"] == [0]


def test_an_engine_on_the_processor_is_told_of_no_device():
    row = new_instance(machine(2), id="plain")
    assert "device_indexes" not in instance_start(instance_id=row.pk)


def template_made():
    command = ["vllm", "serve", "--port", "${port}"]
    return LaunchTemplate.objects.create(name="t", backend="vllm", roles=["collocated"], command=command)


def test_an_engine_on_a_cluster_holds_no_device_of_ours_and_needs_a_template():
    model, template = factories.served_model(), template_made()
    with pytest.raises(ValidationError, match="chooses the node itself"):
        instance_create(actor=ACTOR, id="e1", model=model, provisioner="ray", template=template, host=machine(1))
    with pytest.raises(ValidationError, match="from a launch template only"):
        instance_create(actor=ACTOR, id="e1", model=model, provisioner="ray")
    row = instance_create(actor=ACTOR, id="e1", model=model, provisioner="ray", template=template)
    assert (held(row), row.source) == ([], "ray/default")


def test_a_device_that_another_holds_is_refused_in_words():
    host, model = machine(2), factories.served_model()
    (device, _) = Device.objects.order_by("index")
    new_instance(host, model, id="first", devices=[device])
    with pytest.raises(ValidationError, match="device"):
        new_instance(host, model, id="second", devices=[device])
    assert not Instance.objects.filter(pk="second").exists()
