"""Where steps come near a TPOT, sequences make answers late, not prefills. And what a workflow's late stage may do."""

import math

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.policy import Cost, Supply
from controller.core.types import Role
from controller.dispatch import build_dispatcher
from controller.dispatch.pacing import Backlog, RecentDemand
from controller.dispatch.shadow_state import ShadowInstance
from controller.policies.ordering.feasible_deadlines import FeasibleDeadlines
from tests.controller.dispatch.fleet import SPEED, request, sends, up

FIRST_S = SPEED.prefill_a + SPEED.prefill_b * 100
TIGHT = SPEED.decode_a + 8 * SPEED.decode_c  # 0.028 s; a step of two sequences is 0.79 of it
LOOSE = {"ttft": 5.0, "tpot": 10.0, "output": 400}


def fleet(*names, tpot=TIGHT, overrides=None, **pacing):
    """One request of this TPOT has come and ended, so that recent traffic has it."""
    dispatcher = build_dispatcher("slackline", {"pacing": pacing, **(overrides or {})})
    dispatcher.handle([up(name) for name in names], 0.0)
    dispatcher.handle([ev.Arrived(request("before", tpot=tpot, output=2))], 0.0)
    dispatcher.handle([ev.FirstToken("before"), ev.Finished("before", 2)], FIRST_S)
    return dispatcher


def arrive(dispatcher, now, **of):
    """`of`: what the requests say, by name."""
    arrived = [ev.Arrived(request(name, arrival=now, **says)) for name, says in of.items()]
    return sends(dispatcher.handle(arrived, now))


@pytest.mark.parametrize(("near", "together"), [(0.6, True), (10.0, False)])
def test_loose_requests_of_a_long_queue_go_together_too(near, together):
    """Two answers at `a`, three at `b`, where a step is near the tight TPOT. Eq. 5 does not look at that."""
    dispatcher = fleet("a", "b", tpot=SPEED.decode_a + 6 * SPEED.decode_c, near=near)
    now = 1.0
    for index, at in enumerate("babab"):
        assert arrive(dispatcher, now, **{f"loose{index}": {**LOOSE, "output": 50}}) == [(f"loose{index}", at)]
        now += FIRST_S
        dispatcher.handle([ev.FirstToken(f"loose{index}")], now)
    sent = arrive(dispatcher, now, **{name: {**LOOSE, "prompt": 1, "output": 50} for name in "wxyz"})
    assert len(sent) == 4
    assert ({where for _, where in sent} == {"b"}) is together


def test_an_instance_gets_more_prefill_work_there():
    """0.8 in place of 0.4 of a TTFT of 0.7 s; the answer there can wait as long as it likes."""
    dispatcher = fleet("a")
    arrive(dispatcher, 1.0, running=LOOSE)
    dispatcher.handle([ev.FirstToken("running")], 1.0 + FIRST_S)
    instance = dispatcher._fleet.instances["a"]
    near, far = (Backlog().room(instance, RecentDemand(0.7, tpot, 9.0), 10.0, 2.0) for tpot in (TIGHT, 1.0))
    assert near.tokens == pytest.approx((0.8 * 0.7 - SPEED.prefill_a) / SPEED.prefill_b)
    assert far.tokens == pytest.approx((0.4 * 0.7 - SPEED.prefill_a) / SPEED.prefill_b, rel=0.01)


@pytest.mark.parametrize(("tpot", "goes"), [(TIGHT, False), (1.0, True)])
def test_a_hopeless_request_goes_to_an_idle_instance_only(tpot, goes):
    dispatcher = fleet("a", tpot=tpot)
    arrive(dispatcher, 1.0, running=LOOSE)
    dispatcher.handle([ev.FirstToken("running")], 1.0 + FIRST_S)
    hopeless = request("hopeless", arrival=0.5, ttft=0.1, tpot=10.0, may_defer=True)
    sent = sends(dispatcher.handle([ev.Arrived(hopeless)], 2.0))
    assert sent == ([("hopeless", "a")] if goes else [])
    if not goes:
        assert sends(dispatcher.handle([ev.Finished("running", 400)], 3.0)) == [("hopeless", "a")]


def test_one_of_several_gateways_does_not_see_which_sequences_are_there():
    dispatcher = fleet("a")
    dispatcher.handle([ev.SharesChanged("a", 0.5)], 1.0)
    instance = dispatcher._fleet.instances["a"]
    demand = RecentDemand(1.0, SPEED.decode_a, math.inf)
    assert Backlog().room(instance, demand, math.inf, 1.0).tokens < 0.5 * 0.4 / SPEED.prefill_b


def test_an_instance_that_only_prefills_has_no_steps():
    demand = RecentDemand(1.0, SPEED.decode_a + SPEED.decode_c, math.inf)
    rooms = [
        Backlog().room(ShadowInstance(up("a", role=role).spec), demand, math.inf, 1.0).tokens
        for role in (Role.PREFILL, Role.COLLOCATED)
    ]
    assert rooms[1] == pytest.approx(2 * rooms[0], rel=0.05)


@pytest.mark.parametrize(("name", "value"), [("near", 0.0), ("near_share", 0.0), ("near_share", 1.1), ("doubt", -0.1)])
def test_settings_have_bounds(name, value):
    with pytest.raises(ConfigError, match=name):
        Backlog.Config(**{name: value})


def step(name, left_s, share_s=1.0, **more):
    targets = {"ttft": share_s, "tpot": 10.0, "deadline": share_s}
    return request(name, **targets, workflow="w", workflow_left_s=left_s, may_defer=True, **more)


def waiting(dispatcher, arrived):
    """Waits behind an answer that fills the only slot."""
    dispatcher.handle([up(slots=1), ev.Arrived(request("first", output=10_000))], 0.0)
    dispatcher.handle([ev.Arrived(arrived)], 0.0)
    return dispatcher._fleet.lane("m").queue


def test_a_stage_that_is_late_is_not_served_last_while_its_workflow_can_be_in_time():
    dispatcher = build_dispatcher("slackline")
    queue = waiting(dispatcher, step("s", left_s=5.0))
    entry = queue.get("s")
    assert entry.late_at == pytest.approx(1.0 - FIRST_S - 9 * 0.0211, abs=0.01)
    assert entry.hopeless_at == pytest.approx(entry.late_at + 0.5 * 4.0)
    dispatcher.handle([ev.Woke()], 1.5)
    assert not queue.get("s").hopeless
    assert sends(dispatcher.handle([ev.FirstToken("first"), ev.Finished("first", 9)], 1.6)) == [("s", "w")], (
        "its first token can no longer be in time for its stage, which refuses nothing"
    )


def test_it_is_once_the_workflow_cannot():
    dispatcher = build_dispatcher("slackline")
    queue = waiting(dispatcher, step("s", left_s=5.0))
    dispatcher.handle([ev.Woke()], 2.9)
    assert queue.get("s").hopeless


def test_a_request_of_a_workflow_that_is_late_goes_behind_those_that_can_be_in_time():
    """Its targets are those of its class, which it could keep."""
    dispatcher = build_dispatcher("slackline")
    queue = waiting(dispatcher, step("s", left_s=-1.0, share_s=600.0))
    assert queue.get("s").hopeless
    dispatcher.handle([ev.Arrived(request("other", ttft=30.0))], 0.1)
    ended = [ev.FirstToken("first"), ev.Finished("first", 9)]
    assert sends(dispatcher.handle(ended, 0.2)) == [("other", "w")]
    assert sends(dispatcher.handle([ev.FirstToken("other"), ev.Finished("other", 9)], 0.4)) == [("s", "w")]


def test_an_admission_that_gives_nobody_up_serves_it_in_its_turn():
    dispatcher = build_dispatcher("slackline", {"admission": {"name": "admit_all"}})
    assert not waiting(dispatcher, step("s", left_s=-1.0)).get("s").hopeless


def test_the_last_stage_has_no_more_time_than_the_workflow():
    dispatcher = build_dispatcher("slackline")
    entry = waiting(dispatcher, step("s", left_s=1.0)).get("s")
    assert entry.hopeless_at == entry.late_at


def test_a_late_stage_pushes_nobody_out_of_the_plan():
    """Whoever cannot begin in time makes room for itself by deferring larger ones; it cannot, however many go."""
    cost = Cost(0.1, 0.3, 0.02)
    late, large = step("late", left_s=9.0, share_s=0.05), request("large", ttft=5.0, output=400, prompt=400)
    supply = Supply(1.0, 1_000.0, 0.0, 8, 0.02, 0.01)
    found = [(late, cost), (large, cost._replace(prefill_s=0.5))]
    assert FeasibleDeadlines().defer(found, supply, 0.0) == {"late"}
    assert FeasibleDeadlines().defer(found[::-1], supply, 0.0) == {"late"}


def crowded(doubt, left_s, **overrides):
    """Nine answers at `a`, one at `b`, and a step of 20 tokens whose workflow has two more that take as long."""
    dispatcher = fleet("a", "b", overrides=overrides, doubt=doubt, patience=1.0, margin=1e9)
    now = 1.0
    dispatcher.handle([ev.InstanceDraining("b")], now)
    for index in range(9):
        assert arrive(dispatcher, now, **{f"at-a{index}": LOOSE}) == [(f"at-a{index}", "a")]
        now += FIRST_S
        dispatcher.handle([ev.FirstToken(f"at-a{index}")], now)
    dispatcher.handle([up("b")], now)
    assert arrive(dispatcher, now, at_b=LOOSE) == [("at_b", "b")]
    now += FIRST_S
    dispatcher.handle([ev.FirstToken("at_b")], now)
    asked = step("s", arrival=now, share_s=left_s / 3, left_s=left_s, output=20, least_tokens=2)
    return dispatcher, now, sends(dispatcher.handle([ev.Arrived(asked)], now))


ALONE_S = FIRST_S + 19 * (SPEED.decode_a + SPEED.decode_c)


@pytest.mark.parametrize(
    ("doubt", "left_s", "goes"),
    [
        (0.8, 3.5 * ALONE_S, True),  # a step at `a` takes 1.43 times as long as alone, 0.8 of that is 1.14
        (1.0, 3.5 * ALONE_S, False),
        (0.0, 2.0 * ALONE_S, True),
    ],
)
def test_a_step_whose_workflow_is_in_doubt_takes_no_place_beside_others(doubt, left_s, goes):
    dispatcher, now, sent = crowded(doubt, left_s)
    assert bool(sent) is goes
    if not goes:
        assert not dispatcher._fleet.lane("m").queue.get("s").hopeless
        assert sends(dispatcher.handle([ev.Finished("at_b", 400)], now + 0.05)) == [("s", "b")], "an idle instance"


def test_nothing_is_in_doubt_for_an_admission_that_knows_no_latest_time():
    """It would wait for an idle instance for ever."""
    _, _, sent = crowded(9.0, 3.5 * ALONE_S, admission={"name": "admit_all"})
    assert [name for name, _ in sent] == ["s"]


def test_a_request_without_a_deadline_is_never_in_doubt():
    dispatcher, now, _ = crowded(9.0, 1e6)
    assert arrive(dispatcher, now, loose=LOOSE) != []
