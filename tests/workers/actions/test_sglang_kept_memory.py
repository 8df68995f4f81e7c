"""What an SGLang was told of its memory outlives the worker that told it; the fake dies of a call too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import requests

from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests import factories
from tests.workers.backends.sglang_server import SglangServer, serving
from tests.workers.sleep_orders import Killed, lease_runs_out, looks
from workers.actions import runner as actions
from workers.actions import sglang_sleep, sleeping
from workers.actions.sglang_sleep import SglangSleepClient
from workers.actions.sleep_client import SleepState
from workers.actions.weights_client import EngineAway

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PAUSE, CONTINUE, RELOAD = "/pause_generation", "/continue_generation", "/update_weights_from_disk"
LEVELS = pytest.mark.parametrize("level", [1, 2])


@pytest.fixture
def server(level: int) -> Iterator[SglangServer]:
    made = SglangServer(enable_memory_saver=True, enable_weights_cpu_backup=level == 1)
    with serving(made):
        factories.instance(id="s1", backend="sglang", provisioner="static", url=made.url)
        yield made


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The next worker dies before or after a call of this path, the given time that it makes one; "look": at that."""

    def arm(path: str, after: bool = False, time: int = 1) -> None:
        left = time

        class Client(SglangSleepClient):
            def recall(self, said: SleepState) -> SleepState:
                count("look", True)
                return super().recall(said)

            def _call(
                self, told: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float
            ) -> dict[str, Any]:
                count(told, not after)
                found = super()._call(told, query, body, timeout_s)
                count(told, after)
                return found

        def count(told: str, here: bool) -> None:
            nonlocal left
            left -= told == path and here
            if not left and told == path and here:
                raise Killed

        monkeypatch.setattr(actions, "SglangSleepClient", Client)
        with pytest.raises(Killed):
            looks(5)
        monkeypatch.setattr(actions, "SglangSleepClient", SglangSleepClient)
        lease_runs_out()

    return arm


def told_to_sleep(level: int) -> Action:
    return sleep_order(actor=SYSTEM, instance_id="s1", level=level)


def asleep(level: int) -> None:
    told_to_sleep(level)
    assert [decision.kind for decision in looks(2)] == ["instance_asleep"]


def outcome(times: int = 4) -> tuple[str, str]:
    (decision,) = looks(times)
    return decision.kind, decision.reason


def serves(server: SglangServer) -> bool:
    """With whole weights, and gateways know."""
    known = [spec.id for spec in gateway_snapshot().instances] == ["s1"]
    return known and server.weights == "good" and not server.released and not server.paused


# ---- workers killed -------------------------------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize(
    ("path", "after", "time"),
    [("look", False, 1), (PAUSE, False, 1), (PAUSE, True, 1), ("look", False, 4)],  # the last: after it was released
)
def test_a_successor_ends_the_sleep_that_a_killed_worker_began(
    server: SglangServer, kill: Callable[..., None], level: int, path: str, after: bool, time: int
) -> None:
    told_to_sleep(level)
    kill(path, after, time)
    assert outcome() == ("instance_asleep", f"level_{level}")
    assert server.asked.count(RELEASE) == 1
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome()[0] == "instance_awake"
    assert serves(server)


@LEVELS
@pytest.mark.parametrize("after", [False, True])
def test_whether_it_released_is_not_known_then_nothing_is_told_until_it_is_another_process(
    server: SglangServer, kill: Callable[..., None], level: int, after: bool
) -> None:
    told_to_sleep(level)
    kill(RELEASE, after)
    assert outcome() == ("instance_sleep_failed", "memory_unknown")
    assert (Instance.objects.get(pk="s1").weights, gateway_snapshot().instances) == ("asleep", ())
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome() == ("instance_wake_failed", "memory_unknown")
    assert (server.alive, server.asked.count(RELEASE), server.asked.count(RESUME)) == (True, int(after), 0)
    server.reboot()
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (0, True)


@LEVELS
@pytest.mark.parametrize(("path", "after"), [("look", False), (CONTINUE, False), (CONTINUE, True)])
def test_a_successor_ends_the_wake_up_that_a_killed_worker_began(
    server: SglangServer, kill: Callable[..., None], level: int, path: str, after: bool
) -> None:
    asleep(level)
    wake_order(actor=SYSTEM, instance_id="s1")
    kill(path, after)
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (level, True)
    asleep(level)


@pytest.mark.parametrize("level", [2])
@pytest.mark.parametrize(("path", "after", "time"), [("look", False, 2), (RELOAD, False, 1), (RELOAD, True, 1)])
def test_weights_that_came_back_empty_are_read_again_and_not_resumed_again(
    server: SglangServer, kill: Callable[..., None], level: int, path: str, after: bool, time: int
) -> None:
    asleep(level)
    wake_order(actor=SYSTEM, instance_id="s1")
    kill(path, after, time)
    assert server.released == {"kv_cache", "cuda_graph"}
    assert outcome() == ("instance_awake", "level_2")
    assert (server.asked.count(RESUME), serves(server)) == (2, True)


@pytest.mark.parametrize(("level", "time"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("after", [False, True])
def test_whether_it_resumed_is_not_known_then_it_is_left_asleep(
    server: SglangServer, kill: Callable[..., None], level: int, time: int, after: bool
) -> None:
    asleep(level)
    wake_order(actor=SYSTEM, instance_id="s1")
    kill(RESUME, after, time)
    for _ in range(2):
        assert outcome() == ("instance_wake_failed", "memory_unknown")
        assert (server.alive, gateway_snapshot().instances) == (True, ())
        wake_order(actor=SYSTEM, instance_id="s1")
    server.reboot()
    assert outcome()[0] == "instance_awake"
    assert serves(server)


# ---- answers that do not come ---------------------------------------------------------------------------------------


@LEVELS
def test_a_release_that_takes_long_is_waited_for_not_repeated(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    action = told_to_sleep(level)
    with monkeypatch.context() as short:
        short.setattr(sglang_sleep, "CALL_S", 0.2)
        short.setattr(sglang_sleep, "INFO_S", 0.2)
        real = SglangSleepClient._move

        def stuck(self: SglangSleepClient, path: str, tags: tuple[str, ...], state: str) -> None:
            server.stuck = True
            real(self, path, tags, state)

        short.setattr(SglangSleepClient, "_move", stuck)
        assert looks() == []
    action.refresh_from_db()
    assert (action.params["memory"]["sent"], server.released) == (True, set())
    assert not Decision.objects.filter(kind="instance_asleep").exists()
    server.stuck = False
    assert outcome() == ("instance_asleep", f"level_{level}")
    assert (server.asked.count(RELEASE), len(server.released)) == (1, 3)


@LEVELS
def test_a_release_that_never_left_is_said_again(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    told_to_sleep(level)
    real = SglangSleepClient._move

    def away(self: SglangSleepClient, path: str, tags: tuple[str, ...], state: str) -> None:
        self._url = "http://127.0.0.1:1"
        real(self, path, tags, state)

    with monkeypatch.context() as cut:
        cut.setattr(SglangSleepClient, "_move", away)
        assert looks() == []
    assert server.asked.count(RELEASE) == 0
    assert outcome()[0] == "instance_asleep"


# ---- somebody else's doing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1])
@pytest.mark.parametrize("how", ["paused", "unhealthy"])
def test_what_its_owner_paused_or_is_unhealthy_is_not_taken_for_asleep(
    server: SglangServer, level: int, how: str
) -> None:
    setattr(server, how, True)
    told_to_sleep(level)
    assert outcome() == ("instance_sleep_failed", "not_ready")
    assert (server.asked, Instance.objects.get(pk="s1").weights) == ([], "present")
    assert not Decision.objects.filter(kind="instance_asleep").exists()


@LEVELS
@pytest.mark.parametrize("order", ["before", "after"])
def test_one_that_its_owner_started_again_is_waited_for_and_told_nothing(
    server: SglangServer, level: int, order: str
) -> None:
    asleep(level)
    if order == "before":
        wake_order(actor=SYSTEM, instance_id="s1")
    server.reboot()
    server.unhealthy = True  # as long as it starts
    if order == "after":
        wake_order(actor=SYSTEM, instance_id="s1")
    server.asked.clear()
    assert looks(5) == []
    assert (server.asked, "is not ready" in Action.objects.latest("id").error) == ([], True)
    server.unhealthy = False
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (0, True)


@LEVELS
def test_one_that_is_started_again_over_its_wake_up_is_waited_for(
    server: SglangServer, kill: Callable[..., None], level: int
) -> None:
    asleep(level)
    wake_order(actor=SYSTEM, instance_id="s1")
    kill(CONTINUE, after=True)
    server.reboot()
    server.unhealthy = True
    server.asked.clear()
    assert (looks(5), server.asked) == ([], [])
    server.unhealthy = False
    assert outcome()[0] == "instance_awake"
    assert serves(server)


@pytest.mark.parametrize("level", [1])
def test_one_that_its_owner_started_again_and_paused_is_left_to_him(server: SglangServer, level: int) -> None:
    asleep(level)
    server.reboot()
    server.paused = True
    server.asked.clear()
    action = wake_order(actor=SYSTEM, instance_id="s1")
    assert looks(2) == []
    long_ago = action.created_at - timedelta(seconds=sleeping.STARTS_S)
    Action.objects.filter(pk=action.pk).update(created_at=long_ago)
    assert outcome() == ("instance_wake_failed", "not_ready")
    assert (server.asked, Instance.objects.get(pk="s1").weights) == ([], "asleep")


@LEVELS
def test_one_that_its_owner_pauses_in_its_sleep_wakes_up(server: SglangServer, level: int) -> None:
    """It is paused already: he changes nothing."""
    asleep(level)
    requests.post(f"{server.url}/pause_generation", json={"mode": "abort"}, timeout=60)
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome()[0] == "instance_awake"
    assert serves(server)


@pytest.mark.parametrize("level", [1])
def test_one_that_is_not_ready_at_once_is_continued_again(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """A probe that came in between failed, so it is not ready though it was continued."""
    asleep(level)
    real = SglangSleepClient._serve

    def probed(self: SglangSleepClient) -> None:
        real(self)
        server.unhealthy = server.asked.count(CONTINUE) < 2

    monkeypatch.setattr(SglangSleepClient, "_serve", probed)
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(CONTINUE), serves(server)) == (2, True)


@LEVELS
def test_one_that_its_owner_woke_is_awake_and_can_sleep_again(server: SglangServer, level: int) -> None:
    asleep(level)
    server.released, server.weights, server.paused = set(), "good", False
    wake_order(actor=SYSTEM, instance_id="s1")
    assert outcome()[0] == "instance_awake"
    assert (server.asked.count(RESUME), serves(server)) == (0, True)
    asleep(level)


@pytest.mark.parametrize("level", [1])
def test_one_that_somebody_continued_in_its_sleep_is_not_told_to_release_again(
    server: SglangServer, kill: Callable[..., None], level: int
) -> None:
    told_to_sleep(level)
    kill("look", time=4)
    server.paused = False
    (decision,) = looks()
    assert (decision.reason, server.asked.count(RELEASE)) == ("memory_unknown", 1)
    assert "it was continued from elsewhere" in decision.outcome["error"]


@pytest.mark.parametrize("level", [1])
def test_what_an_order_paused_and_did_not_release_serves_again_when_it_is_given_up(
    server: SglangServer, kill: Callable[..., None], level: int
) -> None:
    action = told_to_sleep(level)
    kill(PAUSE, after=True)
    assert server.paused
    Action.objects.filter(pk=action.pk).update(created_at=action.created_at - actions.TIMEOUTS[Action.Kind.SLEEP] * 2)
    assert outcome(1) == ("instance_sleep_failed", "timeout")
    assert serves(server)


@pytest.mark.parametrize("level", [1])
def test_an_answer_that_is_older_than_what_it_was_told_says_nothing(server: SglangServer, level: int) -> None:
    action = told_to_sleep(level)
    client = SglangSleepClient(server.url)
    client.bind(action)
    before = client.look()
    client.recall(before)
    client.sleep(1)
    assert (client.recall(before).moving, client.recall(before).unknown) == (True, "")
    now = client.recall(client.look())
    assert (now.awake, now.level, now.moving) == (False, 1, False)


@pytest.mark.parametrize("level", [1])
def test_one_that_goes_away_over_a_release_is_asked_what_it_is_when_it_is_back(
    server: SglangServer, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    told_to_sleep(level)
    real = SglangSleepClient._call

    def lost(self: SglangSleepClient, path: str, *rest: Any) -> dict[str, Any]:
        if path == RELEASE:
            server.reboot()
            raise EngineAway("connection reset")
        return real(self, path, *rest)

    with monkeypatch.context() as cut:
        cut.setattr(SglangSleepClient, "_call", lost)
        assert looks() == []
    assert outcome() == ("instance_asleep", "level_1")
    assert server.asked.count(RELEASE) == 1
