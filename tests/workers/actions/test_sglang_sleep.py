"""SGLang put to sleep and woken by the same orders as vLLM, against its contract fake over sockets."""

from __future__ import annotations

from typing import Any

import pytest

from controller.models import Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests import factories
from tests.workers.backends.sglang_server import SglangServer, serving
from tests.workers.sleep_orders import looks

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]


def row_of(server: SglangServer) -> Instance:
    return factories.instance(id="s1", backend="sglang", provisioner="static", url=server.url)


@pytest.mark.parametrize(("backup", "level", "asleep"), [(True, 1, "kept"), (False, 2, "absent")])
def test_it_sleeps_and_wakes_with_whole_weights(backup: bool, level: int, asleep: str) -> None:
    server = SglangServer(enable_memory_saver=True, enable_weights_cpu_backup=backup)
    with serving(server):
        row = row_of(server)
        sleep_order(actor=SYSTEM, instance_id=row.pk, level=level)
        (decision,) = looks(2)
        assert (decision.kind, decision.reason) == ("instance_asleep", f"level_{level}")
        assert (server.weights, server.paused) == (asleep, True)
        assert gateway_snapshot().instances == ()
        wake_order(actor=SYSTEM, instance_id=row.pk)
        (decision,) = looks(3)
        assert (decision.kind, server.weights, server.paused, server.released) == (
            "instance_awake",
            "good",
            False,
            set(),
        )
        if level == 2:
            order = [server.asked.index(path) for path in ("/update_weights_from_disk", "/continue_generation")]
            assert order == sorted(order), "nothing was served before its weights were whole"
        assert [spec.id for spec in gateway_snapshot().instances] == ["s1"]


@pytest.mark.parametrize(
    ("options", "level", "why"),
    [
        ({}, 1, "--enable-memory-saver"),
        ({"enable_memory_saver": True}, 1, "without a copy of its weights"),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, 2, "with a copy of its weights"),
    ],
)
def test_a_sleep_it_was_not_started_for_fails_and_it_serves_on(options: dict[str, Any], level: int, why: str) -> None:
    server = SglangServer(**options)
    with serving(server):
        row = row_of(server)
        sleep_order(actor=SYSTEM, instance_id=row.pk, level=level)
        (decision,) = looks(2)
        assert (decision.kind, decision.reason) == ("instance_sleep_failed", "no_sleep_mode")
        assert why in decision.outcome["error"]
        assert [spec.id for spec in gateway_snapshot().instances] == ["s1"]
        assert not server.paused


def test_weights_that_cannot_be_read_again_are_served_to_no_one() -> None:
    server = SglangServer(enable_memory_saver=True)
    with serving(server):
        row = row_of(server)
        sleep_order(actor=SYSTEM, instance_id=row.pk, level=2)
        looks(2)
        server.disk = "/elsewhere"
        wake_order(actor=SYSTEM, instance_id=row.pk)
        (decision,) = looks(3)
        assert (decision.kind, decision.reason) == ("instance_wake_failed", "reload_failed")
        assert "no model at" in decision.outcome["error"]
        assert (server.paused, gateway_snapshot().instances) == (True, ())
