"""The migrator: who goes where under a TPOT, and every transfer ends committed, placed again or given up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, LatencyCoefficients, Load, Role
from controller.dispatch import MIGRATIONS, build_dispatcher, build_migrator
from controller.dispatch.placements import Prefilled
from controller.dispatch.transfers import State
from tests.controller.dispatch.fleet import kinds, request, sends
from tests.controller.dispatch.fleet import up as serve

STEP = LatencyCoefficients(0.01, 1e-4, 0.0, 0.02, 0.0, 0.001)  # a decode step of n sequences: 20 + n ms


def up(name="d", role=Role.DECODE, slots=32, **more):
    return ev.InstanceUp(InstanceSpec(name, "m", latency=STEP, max_num_seqs=slots, role=role, **more))


def done(name, now=0.0, source="p", **more):
    asked = request(name, arrival=now, **more)
    return ev.PrefillDone(asked, source, asked.prompt_tokens)


def migrator(policy="hyperflexis", decoders=1, slots=32, **overrides):
    made = build_migrator(policy, overrides)
    made.handle([up(f"d{i}", slots=slots) for i in range(decoders)], 0.0)
    return made


def places(reply):
    return [(a.request.id, a.target) for a in reply.actions if isinstance(a, ev.Place)]


def of(reply, kind):
    return [action for action in reply.actions if isinstance(action, kind)]


def commit(made, name, target="d0", now=0.0):
    made.handle([ev.TransferStarted(name, target)], now)
    return made.handle([ev.TransferDone(name, target)], now)


# ---- where ----------------------------------------------------------------------------------------------------------


def test_the_tightest_tpot_goes_first_and_only_while_the_step_stays_under_it():
    """A step of n takes 20 + n ms, a TPOT of 22.5 ms allows two. Of a(30), b(22.5), c(25), d(22.5) in order of arrival
    b and d go first; with either of the others a step would take 23 ms."""
    made = migrator()
    tpots = {"a": 0.030, "b": 0.0225, "c": 0.025, "d": 0.0225}
    reply = made.handle([done(name, tpot=tpot) for name, tpot in tpots.items()], 0.0)
    assert places(reply) == [("b", "d0"), ("d", "d0")]
    assert made.waiting() == 2


def test_who_waits_goes_when_a_tight_one_ends():
    made = migrator()
    made.handle([done("tight", tpot=0.0215)], 0.0)
    assert places(made.handle([done("loose", tpot=0.05, output=50)], 0.0)) == []
    commit(made, "tight", now=0.1)
    assert places(made.handle([ev.Finished("tight", 10)], 0.2)) == [("loose", "d0")]


def test_the_smallest_next_step_matures_first():
    made = migrator(decoders=2)
    assert places(made.handle([done("a"), done("b"), done("c")], 0.0)) == [("a", "d0"), ("b", "d1"), ("c", "d0")]


def test_waiting_costs_pace_and_the_hopeless_go_only_where_they_harm_nobody():
    """9 tokens after the first at 30 ms each: after 90 ms only 20 ms are left for each, less than any step takes.
    Beside `tight` (21.5 ms) a second one harms; on an instance of its own it does not."""
    made = migrator()
    made.handle([done("tight", tpot=0.0215, output=100), done("late", tpot=0.03)], 0.0)
    commit(made, "tight")
    assert places(made.handle([ev.Woke()], 0.1)) == []
    (place,) = of(made.handle([up("d1")], 0.2), ev.Place)
    assert (place.target, place.decision.reason) == ("d1", "hopeless_harmless")
    assert place.decision.figures["pace_s"] == pytest.approx(0.03 - 0.2 / 9)


def test_one_in_time_is_not_hopeless():
    made = migrator(slots=1)
    made.handle([done("first", tpot=0.05, output=100), done("next", 0.0, tpot=0.06)], 0.0)
    commit(made, "first")
    (place,) = of(made.handle([ev.Finished("first", 100)], 0.3), ev.Place)
    assert place.decision.reason == "fits_tpot"
    assert place.decision.figures["pace_s"] == pytest.approx(0.06 - 0.3 / 9)


def test_a_hopeless_request_binds_nobody_after_it():
    """Its TPOT of 1 ms cannot be kept; were it to count, nothing could ever join it."""
    made = migrator()
    (place,) = of(made.handle([done("impossible", tpot=0.001)], 0.0), ev.Place)
    assert place.decision.reason == "hopeless_harmless"
    assert places(made.handle([done("next", tpot=0.03)], 0.0)) == [("next", "d0")]


def test_kv_room_counts_the_expected_answer_and_slots_bound():
    made = build_migrator("hyperflexis")
    made.handle([up("d0", kv_capacity_tokens=1000)], 0.0)
    assert places(made.handle([done("a", prompt=400, output=100)], 0.0)) == [("a", "d0")]
    assert places(made.handle([done("b", prompt=300, output=200)], 0.0)) == []  # 500 < 500 is false
    assert places(made.handle([done("c", prompt=300, output=199)], 0.0)) == [("c", "d0")]
    full = migrator(slots=1)
    assert places(full.handle([done("a"), done("b")], 0.0)) == [("a", "d0")]


def test_round_robin_takes_turns_and_least_outstanding_looks():
    made = migrator("round_robin", decoders=3)
    reply = made.handle([done(f"r{i}") for i in range(4)], 0.0)
    assert [target for _, target in places(reply)] == ["d0", "d1", "d2", "d0"]
    made = migrator("least_outstanding", decoders=2)
    made.handle([done("a"), done("b")], 0.0)
    made.handle([ev.Finished("b", 10)], 0.0)
    assert places(made.handle([done("c")], 0.0)) == [("c", "d1")]


def test_one_shot_chooses_when_the_prefill_is_sent_and_keeps_to_it():
    made = migrator("slackline", decoders=2, migration={"name": "one_shot"})
    made.handle([ev.PrefillSent(request("a"), "p"), ev.PrefillSent(request("b"), "p")], 0.0)
    assert places(made.handle([done("b", 1.0)], 1.0)) == [("b", "d1")]
    made.handle([ev.Finished("b", 10)], 1.5)
    assert places(made.handle([done("a", 2.0)], 2.0)) == [("a", "d0")]
    reply = made.handle([ev.TransferFailed("a", "d0", "no_room")], 2.1)
    assert places(reply) == []
    assert places(made.handle([ev.Woke()], reply.wake_at)) == [("a", "d0")]
    assert places(made.handle([ev.TransferFailed("a", "d0", "link_down")], 3.0)) == [("a", "d1")]


def test_prefill_and_collocated_instances_and_other_models_take_no_decode_stage():
    made = build_migrator("hyperflexis")
    other = ev.InstanceUp(InstanceSpec("o", "other", latency=STEP, role=Role.DECODE))
    made.handle([up("p", Role.PREFILL), up("c", Role.COLLOCATED), other], 0.0)
    assert places(made.handle([done("a")], 0.0)) == []
    made.handle([ev.RoleChanged("c", Role.PREFILL), done("b")], 0.5)
    assert places(made.handle([ev.RoleChanged("c", Role.DECODE)], 1.0)) == [("b", "c")]


def test_a_draining_instance_takes_nothing_and_sleeping_ones_neither():
    made = migrator(decoders=2)
    made.handle([ev.InstanceDraining("d0"), ev.Telemetry("d1", Load(0.0, awake=False))], 0.0)
    assert places(made.handle([done("a")], 0.0)) == []
    assert places(made.handle([ev.Telemetry("d1", Load(1.0))], 1.0)) == [("a", "d1")]


# ---- the life of a transfer -------------------------------------------------------------------------------------


def test_a_transfer_is_placed_moving_and_committed_and_only_then_is_the_source_free():
    made = migrator()
    made.handle([ev.PrefillSent(request("a"), "p")], 0.0)
    assert made.state_of("a") is State.PREFILLING
    (place,) = of(made.handle([done("a", 1.0)], 1.0), ev.Place)
    assert (place.source, place.target, made.state_of("a")) == ("p", "d0", State.PLACED)
    assert place.decision.figures["kv_tokens"] == 100
    assert made.handle([ev.TransferStarted("a", "d0")], 1.1).actions == []
    assert made.state_of("a") is State.MOVING
    assert made.handle([ev.TransferDone("a", "d0")], 1.2).actions == [ev.FreeKv("a", "p")]
    assert made.state_of("a") is State.COMMITTED
    assert made.handle([ev.Finished("a", 10)], 2.0).actions == []
    assert made.state_of("a") is None
    assert made.fleet(2.0)[0].running == 0


@pytest.mark.parametrize("moving", [False, True])
def test_a_transfer_that_takes_too_long_is_undone_and_goes_elsewhere(moving):
    made = migrator(decoders=2, migrator={"placed_timeout_s": 1.0, "moving_timeout_s": 2.0})
    made.handle([done("a")], 0.0)
    if moving:
        made.handle([ev.TransferStarted("a", "d0")], 0.5)
    due = 2.5 if moving else 1.0
    assert made.handle([], due - 0.01).wake_at == due
    reply = made.handle([ev.Woke()], due)
    assert of(reply, ev.Abort) == [ev.Abort("a", "d0", "moving_timeout" if moving else "placed_timeout")]
    assert places(reply) == [("a", "d1")]
    assert made.handle([ev.TransferDone("a", "d0")], due + 0.1).actions == [ev.Abort("a", "d0")]  # too late
    assert made.state_of("a") is not State.COMMITTED


def test_no_room_is_asked_again_soon_and_is_no_failure():
    made = migrator(migrator={"max_failures": 1})
    made.handle([done("a")], 0.0)
    now = 0.0
    for _ in range(20):
        reply = made.handle([ev.TransferFailed("a", "d0", "no_room")], now)
        assert of(reply, ev.GiveUp) == []
        assert reply.wake_at == pytest.approx(now + 0.05)
        now = reply.wake_at
        assert places(made.handle([ev.Woke()], now)) == [("a", "d0")]


def test_a_request_whose_transfers_keep_failing_is_given_up_and_its_kv_freed():
    made = migrator(migrator={"max_failures": 3})
    made.handle([done("a")], 0.0)
    now, waits = 0.0, []
    for _ in range(2):
        reply = made.handle([ev.TransferFailed("a", "d0", "link_down")], now)
        waits.append(reply.wake_at - now)
        now = reply.wake_at
        made.handle([ev.Woke()], now)
    assert waits == pytest.approx([0.1, 0.2])
    reply = made.handle([ev.TransferFailed("a", "d0", "link_down")], now)
    assert [a.decision.reason for a in of(reply, ev.GiveUp)] == ["link_down"]
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    assert made.state_of("a") is None


@pytest.mark.parametrize("state", ["placed", "moving"])
def test_a_dead_target_is_replaced_and_a_dead_source_means_prefill_again(state):
    for gone in ("d0", "p"):
        made = migrator(decoders=2)
        made.handle([done("a")], 0.0)
        if state == "moving":
            made.handle([ev.TransferStarted("a", "d0")], 0.1)
        reply = made.handle([ev.InstanceDown(gone)], 0.2)
        if gone == "d0":
            assert places(reply) == [("a", "d1")]
        else:
            assert of(reply, ev.Abort) == [ev.Abort("a", "d0", "kv_lost")]
            assert [a.decision.reason for a in of(reply, ev.PrefillAgain)] == ["kv_lost"]
            assert made.state_of("a") is None
            assert all(each.waiting == each.running == 0 for each in made.fleet(0.2))


def test_without_any_decode_instance_it_is_held_then_given_up():
    made = build_migrator("hyperflexis", {"migrator": {"hold_s": 5.0}})
    reply = made.handle([done("a")], 0.0)
    assert (reply.actions, reply.wake_at) == ([], 5.0)
    assert [a.decision.reason for a in of(made.handle([ev.Woke()], 5.0), ev.GiveUp)] == ["no_decode_instance"]


def test_what_no_placement_wants_is_held_no_longer_than_told():
    made = migrator(migrator={"hold_s": 5.0})
    made.handle([done("tight", tpot=0.0215, output=1000)], 0.0)
    commit(made, "tight")
    now = 0.0
    reply = made.handle([done("late", tpot=0.03)], now)
    while not places(reply):
        assert now < reply.wake_at <= 5.0
        now = reply.wake_at
        reply = made.handle([ev.Woke()], now)
    assert now == 5.0
    assert of(reply, ev.Place)[0].decision.reason == "held_too_long"


def test_a_client_that_hangs_up_leaves_nothing_behind():
    made = migrator(decoders=1, slots=1)
    for name in ("a", "b"):
        made.handle([done(name)], 0.0)
    commit(made, "a")
    assert made.handle([ev.Cancelled("a")], 1.0).actions[0] == ev.Abort("a", "d0")
    reply = made.handle([ev.Cancelled("b")], 1.0)
    assert set(reply.actions) == {ev.Abort("b", "d0"), ev.FreeKv("b", "p")}
    assert made.handle([ev.Cancelled("b"), ev.Cancelled("nobody")], 1.0).actions == []
    assert made.fleet(1.0)[0].waiting == 0


def test_an_answer_of_one_token_needs_no_decode_stage():
    made = migrator()
    made.handle([ev.PrefillSent(request("a", output=1, max_tokens=1), "p")], 0.0)
    assert made.state_of("a") is None


# ---- beside the dispatcher ------------------------------------------------------------------------------------------


def test_the_dispatcher_lets_go_at_the_end_of_the_prefill():
    """Only first tokens and KV of prompts count on a prefill instance: eq. 5 with E_d = 0."""
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([serve("p", role=Role.PREFILL, kv_capacity_tokens=1000)], 0.0)
    asked = request("a", prompt=600, output=5000)
    assert sends(dispatcher.handle([ev.Arrived(asked)], 0.0)) == [("a", "p")]
    (state,) = dispatcher.fleet(0.0)
    assert state.waiting == 1
    dispatcher.handle([ev.FirstToken("a"), ev.PrefillDone(asked, "p", 600)], 0.07)
    (state,) = dispatcher.fleet(0.1)
    assert (state.waiting, state.running) == (0, 0)
    assert sends(dispatcher.handle([ev.Arrived(request("b", 0.1, prompt=600))], 0.1)) == [("b", "p")]


def test_the_dispatcher_sends_nothing_to_a_decode_instance():
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([up("d0")], 0.0)
    reply = dispatcher.handle([ev.Arrived(request("a"))], 0.0)
    assert sends(reply) == []
    assert kinds(reply, ev.Refuse) == []


# ---- settings, and every placement ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"migration": {"name": "nowhere"}}, "migration"),
        ({"migration": {"share": 2.0}}, "share"),
        ({"migration": {"sharee": 1.0}}, "migration.sharee"),
        ({"migrator": {"retry_s": 0}}, "retry_s"),
        ({"migrator": {"max_failures": 0}}, "max_failures"),
        ({"migrator": {"engine_rank": "x"}}, "engine_rank"),
        ({"migrator": {"holds": 1}}, "migrator.holds"),
    ],
)
def test_wrong_settings_are_refused_by_both_builders(overrides, field):
    for build in (build_migrator, build_dispatcher):
        with pytest.raises(ConfigError) as caught:
            build("hyperflexis", overrides)
        assert caught.value.field == field


@pytest.mark.parametrize("name", list(MIGRATIONS))
def test_placements_say_what_they_are_and_change_nothing(name):
    placement = MIGRATIONS[name]()
    assert placement.name == name
    assert len(MIGRATIONS[name].__doc__) > 40
    made = migrator(migration={"name": name}, decoders=2)
    workers = list(made._roster.workers.values())
    stage = Prefilled(request("a"), 0.0)
    before = [(w.outstanding, w.waiting_tokens, w.last_sent) for w in workers]
    choice = placement.choose(stage, workers, 0.0)
    assert choice.worker in workers
    assert placement.choose(stage, list(reversed(workers)), 0.0) == choice
    assert placement.choose(stage, [], 0.0) is None
    assert before == [(w.outstanding, w.waiting_tokens, w.last_sent) for w in workers]


happenings = st.lists(
    st.tuples(
        st.sampled_from(
            ["prefilled", "started", "done", "failed", "no_room", "finished", "cancelled", "down", "up", "wait"]
        ),
        st.integers(0, 5),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(happenings, st.sampled_from(list(MIGRATIONS)))
def test_whatever_is_said_the_books_balance(script, name):
    """Random news, right or wrong: a request is at one instance at most, and all can still be brought to an end."""
    made = migrator("slackline", decoders=2, slots=2, migration={"name": name})
    now, asked, ended = 0.0, {}, set()
    for what, which, where in script:
        now += 0.3
        rid, target = f"r{which}", f"d{where}"
        event = {
            "started": ev.TransferStarted(rid, target),
            "done": ev.TransferDone(rid, target),
            "failed": ev.TransferFailed(rid, target, "link_down"),
            "no_room": ev.TransferFailed(rid, target, "no_room"),
            "finished": ev.Finished(rid, 10),
            "cancelled": ev.Cancelled(rid),
            "down": ev.InstanceDown(target),
            "up": up(target, slots=2),
            "wait": ev.Woke(),
        }.get(what)
        if what == "prefilled" and rid not in asked:
            asked[rid] = True
            event = done(rid, now)
        if event is None:
            continue
        reply = made.handle([event], now)
        for action in reply.actions:
            if isinstance(action, ev.GiveUp | ev.PrefillAgain):
                assert action.request.id not in ended
                ended.add(action.request.id)
        holders = [rid for state in made.fleet(now) for rid in made._roster.workers[state.id].waiting]
        holders += [rid for state in made.fleet(now) for rid in made._roster.workers[state.id].running]
        assert len(holders) == len(set(holders))
        assert reply.wake_at is None or reply.wake_at > now - 1e-9
    for rid in asked:
        made.handle([ev.Finished(rid, 10)], now)
    assert all(state.running == state.waiting == 0 for state in made.fleet(now))
    assert made.waiting() == 0


def test_the_hopeless_wait_for_all_who_can_still_make_it():
    """One slot: `lost` (pace below any step) is first by TPOT, `fine` comes later and goes first."""
    made = migrator(slots=1)
    made.handle([done("running", tpot=0.05, output=100)], 0.0)
    commit(made, "running")
    made.handle([done("lost", tpot=0.001)], 0.0)
    made.handle([done("fine", 0.1, tpot=0.1, output=100)], 0.1)
    assert made.waiting() == 2
    assert places(made.handle([ev.Finished("running", 100)], 0.2)) == [("fine", "d0")]
    commit(made, "fine", now=0.2)
    assert places(made.handle([ev.Finished("fine", 100)], 1.0)) == [("lost", "d0")]


def test_the_context_still_to_come_counts():
    """10 ms + 0.01 ms a token: a prompt of 500 takes 15 ms now, and 20 ms half-way through 1,000 tokens."""
    for growth, expected in ((0.0, [("a", "d0")]), (0.5, [])):
        made = build_migrator("hyperflexis", {"migration": {"growth": growth}})
        slow = LatencyCoefficients(0.01, 1e-4, 0.0, 0.01, 1e-5, 0.0)
        made.handle([ev.InstanceUp(InstanceSpec("d0", "m", latency=slow, role=Role.DECODE))], 0.0)
        assert places(made.handle([done("a", prompt=500, output=1000, tpot=0.018)], 0.0)) == expected


def test_grouping_keeps_loose_ones_away_from_tight_ones():
    made = migrator(decoders=2, migration={"name": "tpot_grouped"})
    assert places(made.handle([done("tight", tpot=0.03), done("loose", tpot=0.3)], 0.0)) == [
        ("tight", "d0"),
        ("loose", "d1"),
    ]
    assert places(made.handle([done("tight2", tpot=0.03), done("loose2", tpot=0.3)], 0.0)) == [
        ("tight2", "d0"),
        ("loose2", "d1"),
    ]


def test_who_has_the_least_time_for_its_answer_is_placed_first_whatever_its_pace():
    """60 tokens at 0.5 s have 30 s, 9 at 0.9 s have 8: with one place the second gets it."""
    long, short = done("long", output=61, tpot=0.5), done("short", output=10, tpot=0.9)
    for name, first in (("tpot_grouped", "short"), ("tpot_budget", "long")):
        made = migrator(decoders=1, migration={"name": name}, slots=1)
        assert places(made.handle([long, short], 0.0)) == [(first, "d0")]
