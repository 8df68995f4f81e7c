"""The dispatcher as a state machine: Alg. 1 in numbers (H6, H7), its missing branches, commands, what it learns."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.policy import Stateless
from controller.core.types import InstanceSpec, LatencyCoefficients, Load
from controller.dispatch import POLICY_SETS, build_dispatcher
from controller.policies.ordering.least_attained_service import LeastAttainedService
from controller.predict.latency import LatencyModel
from tests.controller.dispatch.fleet import SPEED, Play, kinds, request, sends, up


def test_h7_one_pass():
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([up(slots=64)], 0.0)
    running = [request(f"x{i}", prompt=10, output=2) for i in range(3)]
    dispatcher.handle([ev.Arrived(r) for r in running], 0.0)
    dispatcher.handle([ev.FirstToken(r.id) for r in running], 0.05)
    (instance,) = dispatcher._fleet.instances.values()
    instance.spec.kv_capacity_tokens = 800 + instance.context_tokens + instance.expected_tokens
    queue = [
        request("r1", 9.90, tpot=0.5, prompt=300, output=0),
        request("r2", 9.91, tpot=0.5, prompt=600, output=0),
        request("r3", 9.92, tpot=0.7, prompt=450, output=0),
        request("r4", 9.93, tpot=1.0, prompt=50, output=0),
    ]
    reply = dispatcher.handle([ev.Arrived(r) for r in queue], 10.0)
    assert [name for name, _ in sends(reply)] == ["r1", "r3"]
    assert reply.wake_at == pytest.approx(10.089473684)
    assert reply.actions[0].decision.figures["token_budget"] == 6578
    assert dispatcher.queue().ids() == ["r2", "r4"]


def test_an_idle_instance_with_nothing_to_do_sleeps_until_an_event():
    dispatcher = build_dispatcher("hyperflexis")
    assert dispatcher.handle([up()], 0.0) == ev.Reply([], None)


def test_a_prompt_beyond_every_budget_goes_to_an_idle_engine_alone():
    dispatcher = build_dispatcher("hyperflexis", {"dispatch": {"refuse_infeasible": False}})
    dispatcher.handle([up()], 0.0)
    giant = request("giant", ttft=3.0, prompt=29_000)
    reply = dispatcher.handle([ev.Arrived(giant), ev.Arrived(request("small", ttft=3.0))], 0.0)
    assert sends(reply)[0] == ("giant", "w")


def test_a_prompt_beyond_every_budget_does_not_wait_for_the_decodes_to_end():
    dispatcher = build_dispatcher("slackline", {"dispatch": {"refuse_infeasible": False}})
    dispatcher.handle(
        [up("w"), up("v"), ev.Arrived(request("a", output=999)), ev.Arrived(request("b", output=999))], 0.0
    )
    assert sends(dispatcher.handle([ev.Arrived(request("giant", 0.01, ttft=30.0, prompt=29_000))], 0.01)) == []
    reply = dispatcher.handle([ev.FirstToken("a"), ev.FirstToken("b")], 0.1)
    assert [name for name, _ in sends(reply)] == ["giant"]


def test_decode_slower_than_tpot_waits_for_an_event_never_for_the_past():
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([up(slots=64)], 0.0)
    first = [request(f"a{i}", tpot=0.025) for i in range(6)]
    dispatcher.handle([ev.Arrived(r) for r in first], 0.0)
    dispatcher.handle([ev.FirstToken(f"a{i}") for i in range(6)], 0.1)
    late = dispatcher.handle([ev.Arrived(request("b", 0.2, tpot=0.025))], 0.2)
    assert sends(late) == []
    assert late.wake_at is None or late.wake_at > 0.2
    freed = dispatcher.handle([ev.Finished(f"a{i}", 10) for i in range(6)], 0.3)
    assert sends(freed) == [("b", "w")]


def test_no_queueing_delay_while_there_is_room():
    play = Play("slackline")
    for i in range(40):
        play.at(i * 0.1, ev.Arrived(request(f"r{i}", i * 0.1)))
    play.run()
    assert all(play.times("send")[f"r{i}"] == pytest.approx(i * 0.1) for i in range(40))


def test_hopeless_requests_never_go_first_and_are_never_stuck():
    play = Play("slackline", instances=1, slots=8)
    late = request("late", arrival=-5.0, prompt=500, wait=600)
    play.at(0.0, ev.Arrived(request("warm", prompt=4000)))
    play.at(0.001, ev.Arrived(late))
    for i in range(30):
        play.at(0.002 + i * 0.01, ev.Arrived(request(f"r{i}", 0.002 + i * 0.01, ttft=20.0)))
    play.run()
    order = [name for _, kind, name, _ in play.log if kind == "send"]
    assert order[-1] == "late"
    assert play.ended["late"] == "finished"


def test_shares_bound_what_one_gateway_sends():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=8), ev.SharesChanged("w", 0.25)], 0.0)
    reply = dispatcher.handle([ev.Arrived(request(f"r{i}", ttft=20.0, prompt=10)) for i in range(8)], 0.0)
    assert len(sends(reply)) == 2


def test_other_peoples_load_takes_slots():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=8)], 0.0)
    for at in (1.0, 2.0):
        dispatcher.handle([ev.Telemetry("w", Load(at, running=6))], at)
    reply = dispatcher.handle([ev.Arrived(request(f"r{i}", 2.0, ttft=20.0, prompt=10)) for i in range(8)], 2.0)
    assert len(sends(reply)) == 2


def test_commands_cancel_pause_resume_and_reprioritise():
    dispatcher = build_dispatcher("fcfs_window", {"pacing": {"window": 1}})
    dispatcher.handle([up(), ev.Arrived(request("a"))], 0.0)
    dispatcher.handle([ev.Arrived(request(n)) for n in "bcd"], 0.0)
    cancelled = dispatcher.handle([ev.Command("c1", "op", "cancel", ("b", "gone"))], 0.1)
    assert kinds(cancelled, ev.Drop) == ["b"]
    assert cancelled.actions[0].decision.figures["actor"] == "op"
    dispatcher.handle([ev.Command("c2", "op", "pause", ("c",))], 0.1)
    assert sends(dispatcher.handle([ev.Finished("a", 1)], 0.2)) == [("d", "w")]
    assert sends(dispatcher.handle([ev.Finished("d", 1)], 0.3)) == []
    assert sends(dispatcher.handle([ev.Command("c3", "op", "resume", ("c",))], 0.4)) == [("c", "w")]


def test_what_an_operator_paused_adds_no_pressure():
    dispatcher = build_dispatcher("fcfs_window", {"pacing": {"window": 1}})
    dispatcher.handle([up(), ev.Arrived(request("first")), ev.Arrived(request("held", ttft=0.5))], 0.0)
    dispatcher.handle([ev.Command("c1", "op", "pause", ("held",))], 0.0)
    assert dispatcher.queue().pressure(8, 5.0) == {}
    dispatcher.handle([ev.Arrived(request("waits", arrival=4.0, ttft=4.0))], 4.0)
    assert dispatcher.queue().pressure(8, 5.0) == {"m": (1, pytest.approx(0.25))}
    dispatcher.handle([ev.Command("c2", "op", "resume", ("held",))], 5.0)
    assert dispatcher.queue().pressure(8, 5.0) == {"m": (2, pytest.approx(10.0))}


def test_reprioritising_changes_the_order_and_lets_the_hopeless_go_first():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1), ev.Arrived(request("a"))], 0.0)
    dispatcher.handle([ev.Arrived(request(n, ttft=9.0)) for n in "bcd"], 0.0)
    dispatcher.handle([ev.Arrived(request("late", arrival=-50.0))], 0.0)
    dispatcher.handle([ev.Command("c1", "op", "reprioritise", ("b",), 3)], 0.1)
    dispatcher.handle([ev.Command("c2", "op", "reprioritise", ("late",), 0)], 0.1)
    assert dispatcher.queue().ids() == ["late", "c", "d", "b"]
    order = []
    for at, done in enumerate(["a", "late", "c", "d"], start=1):
        order += sends(dispatcher.handle([ev.Finished(done, 1)], at / 10))
    assert [name for name, _ in order] == ["late", "c", "d", "b"]


def said_first():
    """`said` was sent before `urgent`, by an operator's word."""
    dispatcher = build_dispatcher("slackline")
    said = request("said", ttft=9.0)
    dispatcher.handle([up(slots=1), ev.Arrived(request("a")), ev.Arrived(said)], 0.0)
    dispatcher.handle([ev.Command("c1", "op", "reprioritise", ("said",), 0), ev.Arrived(request("urgent"))], 0.0)
    assert sends(dispatcher.handle([ev.Finished("a", 1)], 0.1)) == [("said", "w")]
    return dispatcher, said


def test_an_operators_word_holds_when_the_instance_failed_it():
    dispatcher, _ = said_first()
    dispatcher.handle([ev.InstanceDraining("w"), ev.Failed("said", True, "cut")], 0.2)
    assert dispatcher.queue().ids() == ["said", "urgent"]
    assert dispatcher.queue().row("said")["priority"] == 0


def test_an_operators_word_holds_when_its_kv_got_nowhere():
    dispatcher, said = said_first()
    again = [ev.PrefillDone(said, "w", said.prompt_tokens), ev.Arrived(said, frozenset({"other"}))]
    assert sends(dispatcher.handle(again, 50.0)) == [("said", "w")], "late by now, and first all the same"


def test_contention_counts_mapped_requests_only():
    dispatcher = build_dispatcher("fcfs_window", {"pacing": {"window": 1}})
    dispatcher.handle([up(), ev.Arrived(request("a")), ev.Arrived(request("b", priority=0))], 0.0)
    assert dispatcher.pending_above(1) is False
    dispatcher.handle([ev.Arrived(request("c", priority=0, level=0))], 0.0)
    assert dispatcher.pending_above(1) is True
    assert dispatcher.pending_above(0) is False


def test_an_unattainable_tpot_starves_no_request():
    """Somebody asks for a token a millisecond: the others must not wait for that."""

    def sent(poison):
        play = Play("slackline", overrides={"dispatch": {"refuse_infeasible": False}})
        for i in range(400):
            play.at(i * 0.05, ev.Arrived(request(f"r{i}", i * 0.05, wait=2.0)))
        for i in range(100 if poison else 0):
            play.at(i * 0.2, ev.Arrived(request(f"p{i}", i * 0.2, tpot=0.001, output=1 + i % 40, wait=2.0)))
        play.run()
        return sum(name.startswith("r") for _, kind, name, _ in play.log if kind == "send")

    assert sent(poison=True) == sent(poison=False) == 400


def test_the_driver_is_told_when_to_expect_a_first_token():
    dispatcher = build_dispatcher("round_robin")
    reply = dispatcher.handle([up(), ev.Arrived(request("a")), ev.Arrived(request("b", prompt=1000))], 0.0)
    first, second = reply.actions
    assert 0.02 <= first.prefill_s < second.prefill_s
    assert second.prefill_s == pytest.approx(0.12, abs=0.03)


def test_queue_heaps_do_not_keep_what_is_gone():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=4)], 0.0)
    for i in range(2_000):
        now = i * 0.01
        dispatcher.handle([ev.Arrived(request(f"r{i}", now, ttft=3600.0, wait=86_400.0))], now)
        dispatcher.handle([ev.Finished(f"r{i}", 3)], now)
    queue = dispatcher._fleet.lane("m").queue
    assert max(len(queue._turns), len(queue._drops)) <= 64 + 2 * len(queue)


def test_a_long_queue_is_judged_again_in_parts():
    """The instance turns out four times as slow: 1,000 costs are predicted again, 100 in a pass, none left out."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1), ev.Arrived(request("first", output=10_000))], 0.0)
    waiting = [request(f"r{i}", ttft=30.0 + i % 7, prompt=200 + i % 50) for i in range(1_000)]
    dispatcher.handle([ev.Arrived(each) for each in waiting], 0.0)
    lane = dispatcher._fleet.lane("m")
    slower = LatencyCoefficients(*(4 * each for each in SPEED))
    new = {each.id: LatencyModel(slower).prefill_sums(each.prompt_tokens, 0) for each in waiting}

    def judged():
        return sum(lane.queue.get(each.id).cost.prefill_s == pytest.approx(new[each.id]) for each in waiting)

    reply = dispatcher.handle([ev.InstanceUp(replace(up(slots=1).spec, latency=slower))], 0.1)
    assert 0 < judged() <= 100
    passes = 1
    while judged() < 1_000:
        assert reply.wake_at <= dispatcher._now + 0.01  # although no event comes
        reply = dispatcher.handle([ev.Woke()], reply.wake_at)
        passes += 1
    assert passes == 10
    entry = lane.queue.get("r0")
    assert entry.hopeless_at == pytest.approx(30.0 - new["r0"])


@pytest.mark.parametrize("paused", [False, True])
def test_what_became_hopeless_after_the_instances_became_slower_is_seen_in_time(paused):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1), ev.Arrived(request("first", output=10_000))], 0.0)
    dispatcher.handle([ev.Arrived(request("r", ttft=1.0, prompt=1000))], 0.0)
    for factor, at in ((4, 0.1), (1, 0.2), (2, 0.3)):
        slower = LatencyCoefficients(*(factor * each for each in SPEED))
        dispatcher.handle([ev.InstanceUp(replace(up(slots=1).spec, latency=slower))], at)
    if paused:
        dispatcher.handle([ev.Command("c", "ops", "pause", ("r",))], 0.31)
    queue = dispatcher._fleet.lane("m").queue
    dispatcher.handle([ev.Woke()], 0.7)
    assert not queue.get("r").hopeless
    dispatcher.handle([ev.Woke()], 0.79)
    if paused:
        dispatcher.handle([ev.Command("d", "ops", "resume", ("r",))], 0.8)
        dispatcher.handle([ev.Woke()], 0.81)
    assert queue.get("r").hopeless


def test_engine_ranks_by_class_and_by_deadline():
    by_class = build_dispatcher("engine_priority_class")
    by_class.handle([up()], 0.0)
    reply = by_class.handle([ev.Arrived(request("a", 5.0, ttft=0.7)), ev.Arrived(request("b", 1.0, ttft=20))], 5.0)
    assert {a.request.id: a.rank for a in reply.actions} == {"a": 700, "b": 20_000}
    by_deadline = build_dispatcher("engine_priority_deadline")
    by_deadline.handle([up()], 0.0)
    reply = by_deadline.handle([ev.Arrived(request("a", 5.0)), ev.Arrived(request("b", 1.0))], 5.0)
    assert {a.request.id: a.rank for a in reply.actions} == {"a": 5700, "b": 1700}


def test_ranks_of_gateways_compare_whatever_their_own_clocks_say():
    """One host has been up for 100 days, the other for an hour; both know how far that is from the shared clock."""
    ranks = {}
    for name, clock, ttft in (("urgent", 8_640_000.0, 0.5), ("relaxed", 3_600.0, 30.0)):
        dispatcher = build_dispatcher("slackline")
        dispatcher.handle([up(), ev.ClockOffset(1_790_000_000.0 - clock)], clock)
        (send,) = dispatcher.handle([ev.Arrived(request(name, clock, ttft=ttft))], clock).actions
        ranks[name] = send.rank
    assert ranks["urgent"] < ranks["relaxed"]
    assert ranks["relaxed"] - ranks["urgent"] == 29_500


def test_the_window_knob_has_its_effect():
    for window in (1, 3):
        dispatcher = build_dispatcher("edf_window", {"pacing": {"window": window}})
        reply = dispatcher.handle([up(), *(ev.Arrived(request(f"r{i}")) for i in range(9))], 0.0)
        assert len(sends(reply)) == window


def test_learned_latency_follows_the_engine():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(), ev.Arrived(request("r", output=2000))], 0.0)
    dispatcher.handle([ev.FirstToken("r")], 0.1)
    for i in range(1, 60):
        dispatcher.handle([ev.Progress("r", 1 + i * 5)], 0.1 + i * 0.25)  # 50 ms a token; the profile says 21
    assert dispatcher.learned()["w"].decode_a > 1.3 * SPEED.decode_a


@pytest.mark.parametrize("assumed", [False, True])
def test_nothing_is_learned_from_a_first_token_that_no_one_saw(assumed):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up()], 0.0)
    for i in range(100):
        name, at = f"r{i}", 10.0 * i
        dispatcher.handle([ev.Arrived(request(name, at, ttft=5.0, output=50))], at)
        dispatcher.handle([ev.FirstToken(name, assumed)], at + 0.1)
        dispatcher.handle([ev.Finished(name, 50)], at + 2.6)
    (instance,) = dispatcher._fleet.instances.values()
    assert (dispatcher.learned()["w"] == SPEED) is assumed
    assert (instance.waiting, instance.running, instance.expected_tokens) == ({}, {}, 0)


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 20),
            st.sampled_from([0.1, 0.7, 2.0, 20.0]),
            st.sampled_from([0.05, 0.5, 1.0]),
            st.integers(1, 3000),
            st.integers(1, 100),
            st.sampled_from([0.5, 5.0, 60.0]),
        ),
        max_size=40,
    )
)
@settings(max_examples=25, deadline=None)
def test_no_policy_loses_duplicates_or_invents_a_request(policy, arrivals):
    play = Play(policy, overrides={"pacing": {"window": 4}} if "window" in policy else None, slots=4)
    for i, (at, ttft, tpot, prompt, output, wait) in enumerate(arrivals):
        play.at(at, ev.Arrived(request(f"r{i}", at, ttft, tpot, prompt, output, wait)))
    play.run()
    assert sorted(play.ended) == sorted(f"r{i}" for i in range(len(arrivals)))
    sent = [name for _, kind, name, _ in play.log if kind == "send"]
    assert len(sent) == len(set(sent))
    assert len(play.dispatcher.queue()) == 0
    assert all(f.running == f.waiting == f.waiting_tokens == 0 for f in play.dispatcher.fleet(play.now))
    assert all(math.isfinite(at) for at, *_ in play.log)


def test_overload_attains_more_than_first_come_first_served():
    """A simulated result for the default set: two engines, 2.5 times what they can prefill, four classes."""

    def attained(policy):
        play = Play(policy, overrides={"pacing": {"window": 8}} if "window" in policy else None)
        wanted = {}
        for i in range(600):
            ttft, prompt = ((0.7, 300), (1.0, 400), (2.0, 1200), (20.0, 6000))[i % 4]
            at = i * 0.04
            wanted[f"r{i}"] = at + ttft
            play.at(at, ev.Arrived(request(f"r{i}", at, ttft, 1.0, prompt)))
        play.run()
        first = play.times("first")
        return sum(first.get(name, 1e9) <= due for name, due in wanted.items()) / 600

    slackline = attained("slackline")
    assert slackline > 1.5 * attained("fcfs_window")
    assert slackline >= attained("hyperflexis") - 0.03


def test_the_journal_names_what_came_left_or_moved_and_rows_tell_their_place():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1), ev.Arrived(request("running", output=999))], 0.0)
    dispatcher.handle([ev.Arrived(request("unheard"))], 0.0)
    journal = dispatcher.journal
    assert journal.take() == set(), "nobody follows"
    journal.follow(True)
    dispatcher.handle([ev.Arrived(request(name, 0.1, ttft=60.0)) for name in "abc"], 0.1)
    assert journal.take() == {"a", "b", "c"}
    dispatcher.handle([], 0.2)
    assert journal.take() == set(), "waiting alone changes nothing"
    dispatcher.handle([ev.Command("1", "olga", "pause", ("a",), None)], 0.2)
    dispatcher.handle([ev.Command("2", "olga", "reprioritise", ("c",), 0)], 0.2)
    dispatcher.handle([ev.Cancelled("b")], 0.2)
    assert journal.take() == {"a", "b", "c"}
    queue = dispatcher.queue()
    rows = {name: queue.row(name, clock_s=1000.0) for name in queue.ids()}
    assert queue.row("b") is None
    assert rows["a"]["paused"]
    assert (rows["c"]["arrived_at"], rows["c"]["ttft_s"]) == (1000.1, 60.0)
    assert 1050 < rows["c"]["due_at"] <= 1060.1
    assert rows["c"]["gives_up_at"] == pytest.approx(1000.1 + 60.0)
    waiting = [row for row in rows.values() if row is not None]
    in_order = sorted(waiting, key=lambda row: (row["order"], row["arrived_at"], row["id"]))
    assert [row["id"] for row in in_order] == queue.ids() == ["c", "unheard", "a"]
    journal.follow(False)
    dispatcher.handle([ev.Cancelled("c")], 0.3)
    assert journal.take() == set()


def test_nothing_waits_in_the_queue_for_an_engine_that_selects_by_value():
    held, told = build_dispatcher("slackline"), build_dispatcher("slackline")
    held.handle([up(slots=4)], 0.0)
    told.handle([ev.InstanceUp(replace(up(slots=4).spec, selects=True))], 0.0)
    arrivals = [ev.Arrived(request(f"r{i}", ttft=20.0, prompt=500)) for i in range(40)]
    assert len(sends(held.handle(arrivals, 0.0))) <= 4
    assert len(sends(told.handle(arrivals, 0.0))) == 40


@pytest.mark.parametrize(("selects", "sent"), [(True, ["a", "b", "c", "d", "e"]), (False, ["a"])])
def test_a_late_request_does_not_wait_in_the_queue_for_an_engine_that_selects(selects, sent):
    """Its first token is late, what it is part of need not be: two engines that select share all, others take one."""
    told = build_dispatcher("slackline", {"dispatch": {"refuse_infeasible": False}})
    engines = ["w", "v"] if selects else ["w"]
    told.handle([ev.InstanceUp(replace(up(name, slots=4).spec, selects=selects)) for name in engines], 0.0)
    late = [request(name, ttft=1e-3, prompt=200 + 10 * index) for index, name in enumerate("abcde")]
    found = sends(told.handle([ev.Arrived(each) for each in late], 0.0))
    assert [name for name, _ in found] == sent
    assert {instance for _, instance in found} == set(engines)


@pytest.mark.parametrize(("policy", "selects"), [("slackline", True), ("round_robin", False)])
def test_where_the_engine_queues_a_full_kv_cache_holds_nothing_back(policy, selects):
    """A queue in front would serve first come, first served, whatever order the engine has."""
    spec = replace(up(slots=64).spec, kv_capacity_tokens=2_000, selects=selects)
    dispatcher = build_dispatcher(policy)
    dispatcher.handle([ev.InstanceUp(spec)], 0.0)
    arrivals = [ev.Arrived(request(f"r{i}", ttft=20.0, prompt=500)) for i in range(40)]
    assert len(sends(dispatcher.handle(arrivals, 0.0))) == 40


@pytest.mark.parametrize(("engines", "named"), [(9, 8), (10, 0)])
def test_a_record_names_the_engines_passed_over_where_they_are_few(engines, named):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(f"w{number}") for number in range(engines)], 0.0)
    (sent,) = dispatcher.handle([ev.Arrived(request("r"))], 0.0).actions
    assert len(sent.decision.rejected) == named
    assert sent.instance_id not in sent.decision.rejected


def test_policies_that_learn_are_told_of_every_event_and_the_others_of_none(monkeypatch):
    heard = []
    monkeypatch.setattr(LeastAttainedService, "observe", lambda self, event, now: heard.append((event, now)))
    monkeypatch.setattr(Stateless, "observe", lambda self, event, now: pytest.fail("it learns nothing"))
    dispatcher = build_dispatcher("slackline", {"ordering": {"name": "least_attained_service"}})
    events = [up(), ev.Arrived(request("r"))]
    dispatcher.handle(events, 3.0)
    assert heard == [(event, 3.0) for event in events]


@pytest.mark.parametrize(("prefill_c", "sent"), [(0.0, ["a", "b"]), (1e-8, ["a"])])
def test_what_fits_eq_5_is_checked_once_more_with_the_quadratic_term(prefill_c, sent):
    """H5: 6,000 tokens fit eq. 5's budget of 6,606; with the quadratic term they mature after 0.82 s, not 0.7."""
    spec = InstanceSpec("w", "m", latency=SPEED._replace(prefill_c=prefill_c), max_num_seqs=32)
    dispatcher = build_dispatcher("hyperflexis")
    dispatcher.handle([ev.InstanceUp(spec)], 0.0)
    dispatcher.handle([ev.Arrived(request("running"))], 0.0)
    dispatcher.handle([ev.FirstToken("running")], 0.02)
    reply = dispatcher.handle([ev.Arrived(request(name, 0.02, prompt=3000)) for name in "ab"], 0.02)
    while not sends(reply):
        reply = dispatcher.handle([ev.Woke()], reply.wake_at)
    assert [name for name, _ in sends(reply)] == sent
