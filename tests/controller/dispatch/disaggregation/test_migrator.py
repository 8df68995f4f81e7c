"""The migrator: every transfer ends committed, placed again or given up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import Role
from controller.dispatch import MIGRATIONS, build_dispatcher, build_migrator
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import commit, done, migrator, of, places, up
from tests.controller.dispatch.fleet import kinds, request, sends
from tests.controller.dispatch.fleet import up as serve

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
def test_a_transfer_that_times_out_is_rolled_back_and_goes_elsewhere(moving):
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


def may_wait(name, waiting_s, now=0.0):
    event = done(name, now)
    event.request.targets = event.request.targets._replace(waiting_time_s=waiting_s)
    return event


def test_without_any_decode_instance_no_one_waits_longer_than_it_may():
    """Also behind another one of its kind, which may wait for longer."""
    made = migrator(decoders=0)
    reply = made.handle([may_wait("patient", 60.0), may_wait("a", 2.0), may_wait("never", 0.0)], 0.0)
    assert ([a.request.id for a in of(reply, ev.GiveUp)], reply.wake_at) == (["never"], 2.0)
    assert of(made.handle([ev.Woke()], 1.9), ev.GiveUp) == []
    assert [a.request.id for a in of(made.handle([ev.Woke()], 2.0), ev.GiveUp)] == ["a"]
    assert [a.request.id for a in of(made.handle([ev.Woke()], made.config.hold_s), ev.GiveUp)] == ["patient"]


def test_who_waits_for_room_waits_for_as_long_as_before():
    """It was sent to an engine in time, and there is one that takes it."""
    made = migrator(slots=1)
    made.handle([may_wait("first", 1.0), may_wait("a", 1.0)], 0.0)
    assert of(made.handle([ev.Woke()], 5.0), ev.GiveUp) == []


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


# ---- settings, and random news ----------------------------------------------------------------------------------


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


happenings = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(
                    "prefilled",
                    "sent",
                    "ending",
                    "started",
                    "reserved",
                    "moves",
                    "done",
                    "failed",
                    "no_room",
                    "released",
                ),
                *("finished", "cancelled", "down", "up", "wait", "wait_long"),
            ]
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
        now += 15.0 if what == "wait_long" else 0.3
        rid, target = f"r{which}", f"d{where}"
        event = {
            "started": ev.TransferStarted(rid, target),
            "reserved": ev.TransferStarted(rid, target, moves=False),
            "moves": ev.TransferMoves(rid, target),
            "released": ev.KvReleased(rid, "p", known=which % 2 == 0),
            "ending": ev.PrefillEnding(rid, "p"),
            "wait_long": ev.Woke(),
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
        if what == "sent" and rid not in asked:
            asked[rid] = True
            event = ev.PrefillSent(request(rid, arrival=now), "p", prefill_s=0.2)
        if event is None:
            continue
        reply = made.handle([event], now)
        for action in reply.actions:
            if isinstance(action, ev.GiveUp | ev.PrefillAgain):
                assert action.request.id not in ended
                ended.add(action.request.id)
        holders = [rid for state in made.fleet(now) for rid in made._roster.instances[state.id].waiting]
        holders += [rid for state in made.fleet(now) for rid in made._roster.instances[state.id].running]
        assert len(holders) == len(set(holders))
        assert reply.wake_at is None or reply.wake_at > now - 1e-9
    for rid in asked:
        made.handle([ev.Finished(rid, 10)], now)
    assert all(state.running == state.waiting == 0 for state in made.fleet(now))
    assert made.waiting() == 0
    for _ in range(3):
        now += 2.0
        made.handle([ev.Woke()], now)
    assert not made.busy, "what nobody said was freed is left to its lease"
    assert made.handle([], now).wake_at is None


def test_orderings_by_instance_hear_how_fast_decoding_is():
    """A step of n sequences takes 20 + n ms, at two decode instances for one that prefills."""
    made = migrator(decoders=2)
    made.handle([up("p", Role.PREFILL)], 0.0)
    paces = [event for event in made.first_bytes.news(0.0) if isinstance(event, ev.DecodePace)]
    assert paces == [("p", pytest.approx(0.021), pytest.approx(0.021), 0.0)]
    for name in "ab":
        made.handle([done(name, 1.0)], 1.0)
        commit(made, name, "d0" if name == "a" else "d1", 1.0)
    made.first_bytes._learned = True
    (pace,) = [event for event in made.first_bytes.news(9.0) if isinstance(event, ev.DecodePace)]
    assert (pace.crowd, pace.token_s) == (2.0, pytest.approx(0.022))
