"""SGLangs that were asleep, or about to be, before it was noted what is released; the fake dies of a call too many."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import Action, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import wake_order
from tests.workers.actions import test_sglang_kept_memory as kept
from tests.workers.actions.test_sglang_kept_memory import LEVELS, PAUSE, RELEASE, RESUME, asleep, looks, outcome, serves
from tests.workers.backends.sglang_server import SglangServer
from tests.workers.sleep_orders import lease_runs_out
from workers.actions import sleeping

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]

server, kill = kept.server, kept.kill


def without_notes(**changed: object) -> None:
    """As the version before left its orders."""
    for action in Action.objects.all():
        action.params.pop("memory", None)
        Action.objects.filter(pk=action.pk).update(params=action.params, **changed)


def was_away() -> None:
    Instance.objects.filter(pk="s1").update(ready_at=timezone.now())


def wake() -> Action:
    return wake_order(actor=SYSTEM, instance_id="s1")


@LEVELS
def test_a_sleeper_wakes_with_whole_weights_and_can_sleep_again(server: SglangServer, level: int) -> None:
    asleep(level)
    without_notes()
    wake()
    assert outcome() == ("instance_awake", f"level_{level}")
    assert (server.asked.count(RESUME), server.alive, serves(server)) == (level, True, True)
    asleep(level)


@LEVELS
@pytest.mark.parametrize("after", [False, True])
def test_a_worker_that_is_killed_over_its_wake_up_leaves_it_asleep(
    server: SglangServer, kill: Callable[..., None], level: int, after: bool
) -> None:
    asleep(level)
    without_notes()
    wake()
    kill(RESUME, after)
    assert outcome() == ("instance_wake_failed", "memory_unknown")
    assert (server.alive, server.asked.count(RESUME), gateway_snapshot().instances) == (True, int(after), ())


@LEVELS
def test_one_that_was_started_again_is_awake(server: SglangServer, level: int) -> None:
    asleep(level)
    without_notes()
    server.reboot()
    wake()
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (0, True)


@LEVELS
@pytest.mark.parametrize("seen", ["before", "while"])
def test_one_that_was_away_since_may_be_another_process_and_is_waited_for(
    server: SglangServer, level: int, seen: str
) -> None:
    """`while`: its wake-up was ordered when it had not answered yet."""
    asleep(level)
    without_notes()
    if seen == "while":
        wake()
        url = server.url
        Instance.objects.filter(pk="s1").update(url="http://127.0.0.1:1")
        assert looks() == []
        Instance.objects.filter(pk="s1").update(url=url)
    server.reboot()
    server.unhealthy = True
    was_away()
    if seen == "before":
        wake()
    server.asked.clear()
    assert (looks(5), server.asked) == ([], [])
    server.unhealthy = False
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (0, True)


@LEVELS
def test_another_process_than_the_one_that_was_found_asleep_is_not_resumed(server: SglangServer, level: int) -> None:
    asleep(level)
    without_notes()
    wake()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleeping, "_wake", lambda action, engine, calls: sleeping._look(engine) and None)
        assert looks() == []  # one look that told nothing
    lease_runs_out()
    server.reboot()
    server.unhealthy = True
    assert (looks(3), server.asked.count(RESUME), server.alive) == ([], 0, True)
    server.unhealthy = False
    assert outcome()[0] == "instance_awake"


@LEVELS
def test_an_order_that_never_saw_the_server_leaves_the_next_one_what_it_knew(server: SglangServer, level: int) -> None:
    asleep(level)
    without_notes()
    action, url = wake(), server.url
    Instance.objects.filter(pk="s1").update(url="http://127.0.0.1:1")
    Action.objects.filter(pk=action.pk).update(created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1))
    assert outcome(1) == ("instance_wake_failed", "timeout")
    Instance.objects.filter(pk="s1").update(url=url)
    wake()
    assert outcome()[0] == "instance_awake"
    assert serves(server)


@LEVELS
def test_what_a_wake_up_that_failed_had_resumed_is_not_known(server: SglangServer, level: int) -> None:
    asleep(level)
    wake()
    url = server.url
    Instance.objects.filter(pk="s1").update(url="http://127.0.0.1:1")
    Action.objects.filter(kind="wake").update(created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1))
    assert outcome(1) == ("instance_wake_failed", "timeout")
    Instance.objects.filter(pk="s1").update(url=url)
    without_notes()
    wake()
    assert outcome() == ("instance_wake_failed", "memory_unknown")
    assert (server.alive, server.asked.count(RESUME)) == (True, 0)
    server.reboot()
    wake()
    assert outcome()[0] == "instance_awake"
    assert serves(server)


@LEVELS
@pytest.mark.parametrize(("path", "after"), [(PAUSE, True), (RELEASE, False), (RELEASE, True)])
def test_a_sleep_that_was_under_way_is_left_as_it_is(
    server: SglangServer, kill: Callable[..., None], level: int, path: str, after: bool
) -> None:
    kept.told_to_sleep(level)
    kill(path, after)
    without_notes()
    assert outcome() == ("instance_sleep_failed", "memory_unknown")
    told = int(path == RELEASE and after)
    assert (server.alive, server.asked.count(RELEASE), gateway_snapshot().instances) == (True, told, ())


@LEVELS
def test_a_wake_up_that_was_under_way_is_left_as_it_is(
    server: SglangServer, kill: Callable[..., None], level: int
) -> None:
    asleep(level)
    wake()
    kill(kept.CONTINUE if level == 1 else kept.RELOAD)
    without_notes()
    assert outcome() == ("instance_wake_failed", "memory_unknown")
    assert (server.alive, server.asked.count(RESUME), gateway_snapshot().instances) == (True, 1, ())
    server.reboot()
    wake()
    assert outcome()[0] == "instance_awake"
    assert serves(server)
