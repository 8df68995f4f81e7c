"""CALM as an ordering: eq. 4.1 on each replica's own costs, window, frames, cutoff (worked examples C2, C3, C5)."""

import json
import math
from dataclasses import replace

import pytest

from controller.core import events as ev
from controller.core.policy import Cost, Replica
from controller.core.steps import Added, Seq
from controller.core.types import Request, Targets
from controller.policies.batching.calm import Calm, CalmConfig
from controller.policies.calm.columns import Columns, Pace
from controller.policies.ordering.calm import (
    CUTOFFS,
    DEEP,
    FEW,
    KINDS,
    MOST_SERVED,
    SAMPLED,
    CalmOrdering,
    Config,
    sequence_of,
)

FREE = Replica("w", token_s=0.02, alone_s=0.02, prefill_b=0.0, prefill_c=0.0, crowd=0, free_slots=64)
FIXED = Config(adapt=False)


def request(name, arrival=0.0, prompt=100, output=10, deadline=None, ttft=1e6, value=1.0, **more):
    return Request(name, arrival, Targets(ttft, 1e6, deadline), prompt, output, "m", value=value, **more)


def ranked(requests, *replicas, now=0.0, config=FIXED):
    frames = CalmOrdering(config).frames()
    for each in requests:
        frames.join(each)
    frames.weigh(replicas or (FREE,), now)
    return frames


def order(frames, instance="w"):
    return list(frames.order(instance))


def test_c2_the_most_goodput_for_its_time_first_then_the_least_slack():
    """Goodput 100, 100 and 300 in 1, 1 and 4 s of generation: 100, 100, 75; the slack of x is 1 s, that of y 19 s."""
    x, y = request("x", prompt=50, output=50, deadline=2.0), request("y", prompt=50, output=50, deadline=20.0)
    z = request("z", prompt=100, output=200, deadline=5.0)
    (bounded_x, bounded_y, bounded_z) = (
        replace(r, least_tokens=r.output_tokens, most_tokens=r.output_tokens) for r in (x, y, z)
    )
    frames = ranked([bounded_z, bounded_y, bounded_x])
    assert order(frames) == ["x", "y", "z"]
    assert [frames.sent(name, "w").goodput_rate for name in "xyz"] == pytest.approx([100.0, 100.0, 75.0])


def test_a_branch_is_worth_its_whole_prompt_though_only_its_own_part_is_computed():
    """900 of its 1,000 tokens are at the instance: as much goodput as the same request without, for less time."""
    replica = FREE._replace(prefill_b=0.01)
    whole = request("whole", prompt=1000, output=50, deadline=60.0)
    branch = request("branch", prompt=100, output=50, deadline=60.0, shared_tokens=900, shared_at="w")
    paced = request("paced", prompt=100, output=50, least_tokens=1, most_tokens=50, shared_tokens=900, shared_at="w")
    assert sequence_of(branch).estimate.goodput == sequence_of(whole).estimate.goodput
    assert sequence_of(paced).estimate == sequence_of(replace(paced, shared_tokens=0)).estimate
    frames = ranked([whole, branch], replica)
    assert order(frames) == ["branch", "whole"]
    ordering = CalmOrdering(FIXED)
    cost = Cost(0.0, 1.0, 0.0)
    assert ordering.rank(branch, cost, 0.0).key[1] == ordering.rank(whole, cost, 0.0).key[1]


C3 = {"a": (10, 1000), "b": (9.9, 50), "c": (9.8, 900), "d": (9.6, 950), "e": (9.4, 40), "f": (5, 45)}


@pytest.mark.parametrize(("cutoff", "window"), [(0.95, "cda"), (1.0, "abc"), (0.5, "cda")])
def test_c3_the_window_of_similar_lengths_goes_first(cutoff, window):
    requests = [request(name, prompt=length, value=worth * 0.02) for name, (worth, length) in C3.items()]
    frames = ranked(requests, FREE._replace(free_slots=3), config=Config(cutoff=cutoff, adapt=False))
    assert set(order(frames)[:3]) == set(window)
    assert order(frames)[3:] == sorted(set(C3) - set(window), key=lambda name: -C3[name][0])
    tiers = {name: frames.sent(name, "w").tier for name in C3}
    assert tiers == {name: "window" if name in window else "rest" for name in C3}


def test_c5_who_waits_goes_ahead_in_the_end():
    """Goodput 40 in 2 s against 100 for each second, and 0.5 for each frame waited: ahead after 321 frames."""
    waits = request("waits", prompt=40, output=100, value=0.4)
    frames = ranked([waits])
    length = 50 * FREE.token_s
    for frame in range(1, 322):
        now = frame * length
        rival = request(f"rival{frame}", now, output=50, value=2.0)
        frames.join(rival)
        assert frames.due({"w"}, now)
        frames.weigh([FREE], now)
        assert (order(frames)[0] == "waits") == (frame >= 321), frame
        frames.leave(rival.id)


def test_priorities_are_those_of_the_engines_scheduler():
    """The same columns: the engine's batching gives the same sequences the same priorities."""
    requests = []
    for i in range(40):
        most = 30 + i + 13 * i % 200
        bounds = {"least_tokens": 10 + i, "most_tokens": most}
        requests.append(request(f"r{i}", i * 0.01, 50 + 37 * i % 900, most - 5, 20.0 if i % 2 else None, **bounds))
    replica = FREE._replace(prefill_b=1e-4, crowd=40)
    frames = ranked(requests, replica, now=1.0)
    engine = Calm(CalmConfig(token_s=0.02, prefill_s=1e-4))
    seqs = [sequence_of(each) for each in requests]
    for seq in seqs:
        engine.observe(Added(seq), 1.0)
    expected = engine.standings(seqs, 1.0).priority.tolist()
    found = [frames.sent(each.id, "w").goodput_rate for each in requests]
    assert found == pytest.approx(expected)
    assert len(set(found)) > 20


QUICK = FREE._replace(id="quick", token_s=0.01, alone_s=0.01)
SLOW = FREE._replace(id="slow", token_s=0.04, alone_s=0.04)


def test_each_unlike_replica_has_its_own_order():
    """100 tokens take 1 s on the quick replica and 4 s on the slow one: with 2 s they can only be in time there."""
    tight, loose = request("tight", output=100, deadline=2.0), request("loose", output=100, deadline=60.0)
    frames = ranked([tight, loose], QUICK, SLOW)
    assert order(frames, "quick") == ["tight", "loose"]
    assert order(frames, "slow") == ["loose"]
    assert frames.best({"quick", "slow"}) == ["quick"]
    assert frames.best({"slow"}) == ["slow"]
    copy = frames.sent("loose", "slow")
    assert copy.goodput_rate == pytest.approx(copy.others["quick"] / 4)
    assert frames.sent("tight", "quick").others == {}


@pytest.mark.parametrize("others", [0, 2 * FEW])
def test_what_prefix_caches_hold_of_a_tenants_prompts_costs_nothing(others):
    """1,000 tokens take 1 s, of which w has 0.75 s in its cache: it is in time there alone. Later ones are placed
    likewise within the frame."""
    cold = FREE._replace(id="cold", prefill_b=1e-3, crowd=1)
    warm = cold._replace(id="w", cached={("t", ""): 0.75})
    asked = {"prompt": 1000, "output": 10, "deadline": 0.8}
    crowd = [request(f"other{at}", prompt=1000, output=1, value=1e-6, tenant="t") for at in range(others)]
    first, other = request("first", tenant="t", **asked), request("other", tenant="u", **asked)
    frames = ranked([*crowd, request("seen", tenant="t", **asked)], cold, warm)
    for each in (first, other):
        frames.join(each)
    frames.weigh([cold, warm], 0.0)
    for name in ("seen", "first"):
        copies = [frames.sent(name, where) for where in ("w", "cold")]
        assert [copy.tier == "late" for copy in copies] == [False, True], name
        assert copies[0].goodput_rate == pytest.approx(1010 / (0.25 + 10 * 0.02), rel=0.02)
    assert {frames.sent("other", where).tier for where in ("w", "cold")} == {"late"}


def test_tenants_of_whom_nothing_waits_cost_no_time():
    class Served(dict):
        """What thousands of tenants left in a prefix cache."""

        def __iter__(self):
            raise AssertionError("all of them are looked at")

    warm = FREE._replace(cached=Served({(f"t{at}", ""): 0.5 for at in range(5000)}))
    frames = ranked([request("a", tenant="t7", output=50)], warm)
    frames.join(request("b", tenant="t8", output=60))
    frames.weigh([warm], 0.01)
    assert order(frames) == ["a", "b"]


class Asked(dict):
    """What a prefix cache holds, which counts how often it is asked."""

    asked = 0

    def get(self, name, default=None):
        self.asked += 1
        return super().get(name, default)


@pytest.mark.parametrize(("tenants", "most"), [(50, 50), (3 * KINDS, KINDS + SAMPLED)])
def test_each_instances_prefix_cache_is_asked_once_in_a_frame(tenants, most):
    replicas = [
        FREE._replace(id=f"w{at}", prefill_b=1e-3 * 1.5**at, cached=Asked({("t0", ""): 0.5})) for at in range(4)
    ]
    crowd = [request(f"r{at}", tenant=f"t{at % tenants}") for at in range(2 * tenants)]
    frames = ranked(crowd, *replicas, config=Config(fair_weight=0.5))
    assert len(frames._lines) == 4
    assert all(0 < each.cached.asked <= most for each in replicas)


def test_tenants_of_whom_little_waits_share_what_the_prefix_cache_holds_of_them():
    """1,000 tokens take 1 s. Of the tenant of whom most waits, 0.9 s are cached; of the others 0.5 s on average."""
    others = 4 * KINDS
    held = {("most", ""): 0.9, **{(f"t{at}", ""): at / (others - 1) for at in range(others)}}
    crowd = [request(f"r{at}", tenant=f"t{at}") for at in range(others)]
    asked = {"prompt": 1000, "output": 10, "deadline": 60.0, "value": 9.0}
    compared = [request(f"of {tenant}", tenant=tenant, **asked) for tenant in ("most", "least")]
    several = [request(f"more{at}", tenant="most") for at in range(2)]
    warm = FREE._replace(prefill_b=1e-3, crowd=1, cached=held)
    frames = ranked([*crowd, *several, *compared], warm)
    rates = [frames.sent(each.id, "w").goodput_rate for each in compared]
    generation_s = [9 * 1010 / rate for rate in rates]
    assert generation_s == pytest.approx([0.1 + 0.2, 0.5 + 0.2], abs=0.15)
    assert generation_s[0] == pytest.approx(0.3)


def test_replicas_whose_prefix_caches_hold_unlike_parts_are_unlike():
    """A part of what one request in ten asks for changes little, of what nine ask for much."""
    requests = [request(f"r{at}", tenant="t", prompt=1000) for at in range(9)] + [request("u", tenant="u", prompt=1000)]
    cold = FREE._replace(id="cold", prefill_b=1e-3, crowd=1)
    few, many = cold._replace(id="w", cached={("u", ""): 0.3}), cold._replace(id="w", cached={("t", ""): 0.3})
    assert [len(ranked(requests, cold, warm)._lines) for warm in (few, many)] == [1, 2]


def test_once_it_is_sent_its_other_copies_are_gone():
    frames = ranked([request("a", output=100), request("b", output=50)], QUICK, SLOW)
    frames.leave("b")
    assert order(frames, "quick") == order(frames, "slow") == ["a"]


def test_what_is_late_everywhere_goes_last_and_the_cheapest_first():
    dear, cheap = request("dear", output=900, deadline=1.0), request("cheap", output=400, deadline=1.0)
    frames = ranked([dear, cheap, request("able", output=10)], QUICK, SLOW)
    assert order(frames, "quick") == order(frames, "slow") == ["able", "cheap", "dear"]
    assert frames.sent("cheap", "slow").tier == "late"
    frames.leave("able")
    assert set(frames.best({"quick", "slow"})) == {"quick"}  # where it takes the least time
    assert frames.best({"slow"}) == ["slow"]


def test_alike_replicas_share_a_copy_and_unlike_ones_at_most_so_many():
    alike = [QUICK._replace(id=f"q{i}", token_s=0.01 * (1 + i / 1000)) for i in range(5)]
    frames = ranked([request("a")], *alike)
    assert set(frames.best({each.id for each in alike})) == {each.id for each in alike}
    unlike = [QUICK._replace(id=f"u{i}", token_s=0.01 * 1.3**i, alone_s=0.01 * 1.3**i) for i in range(20)]
    frames = ranked([request("a")], *unlike, config=Config(copies=3))
    assert len(frames.sent("a", "u0").others) > 0
    assert len({round(rate, 9) for rate in frames.sent("a", "u0").others.values()}) <= 2
    assert all(order(frames, each.id) == ["a"] for each in unlike)


def test_a_frame_is_as_long_as_its_steps_take_at_the_instances():
    busy, idle = FREE._replace(id="busy", token_s=0.03, crowd=9), FREE._replace(id="idle", token_s=0.01)
    frames = ranked([request("a")], busy, idle)
    assert not frames.due({"busy", "idle"}, 1.499)
    assert frames.due({"busy", "idle"}, 1.5)
    frames.weigh([busy, idle], 1.5)
    assert frames.frame == 2
    frames.weigh([busy, idle], 1.5 + 4 * 1.5)
    assert frames.frame == 6


def test_new_requests_and_instances_are_placed_within_the_frame():
    frames = ranked([request(f"r{i}", output=100) for i in range(FEW + 5)])
    frame = frames.frame
    assert not frames.due({"w"}, 0.1)
    for name, value in (("better", 2.0), ("worse", 0.5)):
        frames.join(request(name, 0.1, output=100, value=value))
    assert frames.due({"w"}, 0.1)
    frames.weigh([FREE._replace(free_slots=1)], 0.1)
    assert order(frames)[-1] == "worse"
    assert order(frames)[0] == "better"
    assert frames.sent("better", "w").tier == "window"
    assert frames.frame == frame
    assert frames.due({"w", "v"}, 0.1)
    frames.weigh([FREE, FREE._replace(id="v")], 0.1)
    assert order(frames, "v")


def test_more_than_it_ranks_at_once_are_all_sent_in_the_end():
    requests = [request(f"r{i}", i * 1e-3, output=10 + i % 50) for i in range(3 * DEEP)]
    frames = ranked(requests, FREE._replace(free_slots=4))
    taken = []
    while frames.due({"w"}, 0.5) or order(frames):
        frames.weigh([FREE._replace(free_slots=4)], 0.5)
        for name in order(frames):
            frames.leave(name)
            taken.append(name)
        if len(taken) > len(requests):
            break
    assert sorted(taken) == sorted(each.id for each in requests)


def test_an_order_that_runs_out_as_requests_arrive_is_made_anew():
    one = FREE._replace(free_slots=1)
    frames = ranked([request(f"r{i}", i * 1e-3, output=10 + i % 50) for i in range(3 * DEEP)], one)
    ranked_first = order(frames)
    assert len(ranked_first) < 2 * DEEP
    for name in ranked_first:
        frames.leave(name)
    frames.join(request("new", 0.1, output=10, value=1e-3))
    frames.weigh([one], 0.1)
    assert len(order(frames)) > DEEP
    assert frames.best({"w"}) == ["w"]


def test_what_keeps_its_place_is_not_moved():
    frames = ranked([request(f"r{i}", output=10 + i, deadline=90.0) for i in range(5)])
    frames.join(request("new", 0.1, output=12, deadline=90.0))
    assert set(frames.weigh([FREE], 0.1)) == {"new"}
    assert set(frames.weigh([FREE], 1.5)) == {"new", *(f"r{i}" for i in range(5))}, "a frame passed: all waited longer"


def test_the_cutoff_is_adapted_under_load_alone():
    ordering = CalmOrdering()
    frames = ordering.frames()
    assert frames.cutoff == CUTOFFS[0]
    now, waiting = 0.0, request("waits", output=10)
    for frame in range(100):  # everything goes within its frame
        each = request(f"r{frame}", now)
        frames.join(each)
        frames.weigh([FREE], now)
        frames.sent(each.id, "w")
        frames.leave(each.id)
        ordering.observe(ev.Finished(each.id, 10), now)
        now += 1.0
    assert frames.cutoff == CUTOFFS[0]
    frames.join(waiting)
    for _ in range(45):
        frames.weigh([FREE], now)
        now += 1.0
    assert frames.cutoff == CUTOFFS[1]


def test_a_fixed_cutoff_stays():
    frames = ranked([request("a")], config=Config(cutoff=0.7, adapt=False))
    for frame in range(100):
        frames.weigh([FREE], frame * 1.0)
    assert frames.cutoff == 0.7


def contended(frames, seconds, now=0.0, tenant="rich"):
    """Something waits for that long, in frames of a second."""
    for _ in range(seconds):
        for name in ("waits", f"r{now}"):
            frames.join(request(name, now, tenant=tenant))
        frames.weigh([FREE], now)
        frames.sent(f"r{now}", "w")
        frames.leave(f"r{now}")
        now += 1.0
    return now


def restored(state, age_s=0.0, now=5.0, config=None):
    frames = CalmOrdering(config or Config()).frames()
    assert frames.restore(json.loads(json.dumps(state)), age_s, now)
    return frames


def test_another_process_goes_on_with_cutoff_frame_and_shares():
    frames = CalmOrdering().frames()
    assert frames.state(0.0) is None, "no frame has begun"
    now = contended(frames, 60)
    assert frames.cutoff == CUTOFFS[1]
    again = restored(frames.state(now), now=7.0)
    assert (again.cutoff, again.frame) == (frames.cutoff, frames.frame)
    assert again.state(7.0) == frames.state(now)
    contended(frames, 50, now)
    contended(again, 50, 7.0)
    assert again.cutoff == frames.cutoff == CUTOFFS[2]
    assert again.frame == frames.frame


def test_while_no_process_ran_shares_are_forgotten_and_the_cutoff_rests():
    frames = CalmOrdering().frames()
    now = contended(frames, 60)
    state, (before,) = frames.state(now), frames._served.values()
    again = restored(state, age_s=100.0)
    again.join(request("new", 5.0))
    again.weigh([FREE], 5.0)
    assert again.frame == pytest.approx(frames.frame + 100, abs=1)
    assert again._served["rich"] == pytest.approx(before / 2, rel=0.02)
    assert again.cutoff == frames.cutoff
    contended(again, 15, 6.0)
    assert again.cutoff == frames.cutoff, "the seconds between are none in which something waited"


def test_with_other_settings_a_process_begins_anew():
    frames = CalmOrdering().frames()
    state = frames.state(contended(frames, 60))
    for config in (Config(frame_steps=20), Config(adapt=False), Config(fair_weight=0.5)):
        other = CalmOrdering(config).frames()
        before = other.cutoff
        assert not other.restore(state, 0.0, 5.0)
        assert (other.cutoff, other.frame, other.state(5.0)) == (before, 0, None)


def test_shares_of_the_most_served_are_kept():
    frames = CalmOrdering().frames()
    contended(frames, 2)
    frames._served = {f"t{number}": float(number) for number in range(3 * MOST_SERVED)}
    served = frames.state(2.0)["served"]
    assert len(served) == MOST_SERVED
    assert served[0] == (f"t{3 * MOST_SERVED - 1}", 3.0 * MOST_SERVED - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame": [1, 1.0]}, {"frame": [-1, 1.0, 1.0]}, {"frame": [1, math.nan, 1.0]}, {"frame": None},
        {"served": [["rich", -1.0]]}, {"served": [["rich", "much"]]}, {"served": {"rich": 1.0}}, {"cutoff": {}},
    ],
)  # fmt: skip
def test_what_is_no_state_changes_nothing(wrong):
    frames = CalmOrdering().frames()
    state = frames.state(contended(frames, 60))
    other = CalmOrdering().frames()
    with pytest.raises((KeyError, TypeError, ValueError)):
        other.restore({**state, **wrong}, 0.0, 5.0)
    assert (other.cutoff, other.frame, other.state(5.0)) == (CUTOFFS[0], 0, None)


def test_nothing_is_kept_of_requests_that_left():
    ordering = CalmOrdering(Config(keep=3))
    frames = ordering.frames()
    for i in range(500):
        frames.join(request(f"r{i}", workflow=f"w{i}", deadline=100.0, workflow_left_s=200.0))
        if i % 3:
            frames.weigh([QUICK, SLOW], i * 0.1)
            frames.sent(f"r{i}", "quick")
        frames.leave(f"r{i}")
    assert len(ordering._sent) <= 3
    assert not any((frames._seqs, frames._new, frames._columns.rows, frames._columns._groups, frames._kinds))
    assert frames._columns._size == 256
    assert not frames.due({"quick"}, math.inf)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame_steps": 0}, {"fair_weight": 1.1}, {"copies": 0}, {"keep": 0}, {"cutoff": 0.0}, {"cutoff": 1.5},
        {"starvation": -1.0}, {"starvation": math.nan},
    ],
)  # fmt: skip
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)


def test_c5_who_was_sent_less_goes_first_with_half_the_weight():
    """Priorities 100 and 75, Fair 0 and 1, f = 0.5: 0.5 and 0.875."""
    rich, poor = (
        request("rich", output=100, value=2.0, tenant="rich"),
        request("poor", output=100, value=1.5, tenant="p"),
    )
    for weight, first in ((0.0, "rich"), (0.5, "poor")):
        frames = ranked([request("before", output=50, tenant="rich")], config=Config(fair_weight=weight, adapt=False))
        frames.sent("before", "w")
        frames.leave("before")
        frames.join(rich)
        frames.join(poor)
        frames.weigh([FREE], 0.1)
        assert order(frames)[0] == first
        line = frames._by_instance["w"]
        if weight:
            assert [-key[1] for key in line.keys] == pytest.approx([0.875, 0.5])
        assert frames.sent("poor", "w").goodput_rate == pytest.approx(75.0), "as worth it is, whoever gets it"


def test_what_a_tenant_was_sent_is_forgotten():
    frames = ranked([request("a", tenant="t", output=100)], config=Config(fair_weight=0.5))
    frames.sent("a", "w")
    before = frames._served["t"]
    frames.weigh([FREE], 100.0)
    assert frames._served["t"] == pytest.approx(before / 2)
    frames.weigh([FREE], 2000.0)
    assert frames._served == {}


def test_a_request_is_lost_only_when_its_workflow_is():
    """100 tokens take 2 s: too late for the end of their step, but not for the workflow. Calls of one workflow are
    lost together, and those of another tenant's workflow of the same name are not."""
    workflow = {"deadline": 1.0, "workflow": "w", "tenant": "t"}
    late, lost = request("late", output=100, workflow_left_s=9.0, **workflow), request("lost", output=100, **workflow)
    frames = ranked([late, lost])
    assert [frames.sent(name, "w").tier for name in ("late", "lost")] == ["window", "late"]
    over = request("over", output=100, workflow_left_s=1.0, **workflow)
    sibling = request("sibling", output=2, workflow_left_s=9.0, **workflow)
    other = request("other", output=2, workflow_left_s=9.0, **{**workflow, "tenant": "u"})
    frames = ranked([over, sibling, other])
    tiers = {name: frames.sent(name, "w").tier for name in ("over", "sibling", "other")}
    assert tiers == {"over": "late", "sibling": "late", "other": "window"}


def test_parallel_calls_of_a_workflow_are_worth_what_they_earn_together():
    """Each is worth its own tokens, and the workflow earns those of both in the time of both."""
    workflow = {"deadline": 9.0, "workflow": "w", "tenant": "t", "workflow_left_s": 9.0}
    both = [request(name, output=100, prompt=prompt, **workflow) for name, prompt in (("p1", 100), ("p2", 300))]
    alone = request("alone", output=200, prompt=400, deadline=9.0)
    other = request("other", output=50, prompt=100, **{**workflow, "workflow": "x"})
    frames = ranked([*both, alone, other])
    rates = {name: frames.sent(name, "w").goodput_rate for name in ("p1", "p2", "alone", "other")}
    assert rates["p1"] == rates["p2"] == pytest.approx(rates["alone"])
    assert rates["other"] == pytest.approx(150 / 1.0, rel=0.01)
    frames.leave("p2")
    frames.weigh([FREE], 0.0)
    assert frames.sent("p1", "w").goodput_rate < 0.8 * rates["p1"]


def test_rows_of_a_burst_are_given_back():
    columns = Columns()
    seqs = [Seq(f"s{at}", 0.0, 10, 10, due=9.0, ttft_s=9.0, tpot_s=1.0) for at in range(5000)]
    for at, seq in enumerate(seqs):
        columns.add(seq, at)
    for seq in seqs[3:]:
        columns.drop(seq)
    before = columns.weigh(0.0, 5000, Pace(0.01, 0.001, 1.0, 0.01), 0.5)
    kept = [before.priority[columns.rows[seq]] for seq in seqs[:3]]
    columns.shrink()
    after = columns.weigh(0.0, 5000, Pace(0.01, 0.001, 1.0, 0.01), 0.5)
    assert len(after.priority) < 1000
    assert [after.priority[columns.rows[seq]] for seq in seqs[:3]] == kept
    assert [columns.since[columns.rows[seq]] for seq in seqs[:3]] == [0, 1, 2]
