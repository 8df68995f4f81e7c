"""An instance that alone can keep the targets of some requests: while it is there, when it goes, and once it is back.

4,000 prompt tokens take 0.25 s on the fast instance and 1 s on the slow one; 0.6 s are allowed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.types import LatencyCoefficients, Targets
from controller.scale import ScalingConfig
from controller.simulator import Demand, ElasticSettings, InstanceSettings
from tests.controller.simulator.runs import simulate

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)
FAST = InstanceSettings(A100, max_num_seqs=64)
SLOW = replace(FAST, latency=LatencyCoefficients(*(4 * each for each in A100)))
TIGHT, LOOSE = Targets(0.6, 0.2, None, 10.0), Targets(5.0, 0.3, None, 20.0)
ONE_OR_TWO = ScalingConfig("model", min_instances=1, max_instances=2)


def tight(start_s, end_s):
    return [Demand(f"tight{at}", float(at), 4000, 4, TIGHT, "tight", max_tokens=4) for at in range(start_s, end_s)]


def loose(start_s, end_s, each_s=1, output=20):
    times = [(at, i) for at in range(start_s, end_s) for i in range(each_s)]
    return [
        Demand(f"loose{at}-{i}", at + 0.5 + i / each_s / 2, 400, output, LOOSE, "loose", max_tokens=output)
        for at, i in times
    ]


def run(demands, instances, **elastic):
    demands = sorted(demands, key=lambda demand: demand.at)
    return simulate(demands, instances=instances, elastic=ElasticSettings(ONE_OR_TWO, **elastic) if elastic else None)


def of(result, name, start_s=0, end_s=1_000):
    return [each for each in result.records if each.id.startswith(name) and start_s <= each.at < end_s]


@pytest.mark.parametrize("sleep_level", [0, 1], ids=["stopped", "asleep"])
@pytest.mark.parametrize("fast", [0, 1], ids=["first", "second"])
def test_it_is_not_scaled_in_while_requests_need_it(fast, sleep_level):
    """Load is low, and it is the one that has the least to do."""
    instances = (FAST, SLOW) if fast == 0 else (SLOW, FAST)
    result = run([*tight(0, 60), *loose(0, 60)], instances, sleep_level=sleep_level)
    gone = [d.figures["instance"] for d in result.decisions if d.kind == "scale_in" and d.at < 60]
    assert gone == [f"engine-{1 - fast}"], "the other one, and nothing comes back"
    assert all(each.attained for each in result.records)
    assert {each.instance for each in of(result, "tight")} == {f"engine-{fast}"}


def test_both_stay_where_each_is_needed():
    """The slow one has the longer context, and a prompt in half a minute needs that."""
    long = [
        Demand(f"long{at}", at + 0.25, 8500, 4, Targets(8.0, 0.3, None, 20.0), "long", max_tokens=4)
        for at in range(0, 60, 30)
    ]
    result = run([*tight(0, 60), *long], (FAST, replace(SLOW, max_model_len=16_384)), sleep_level=1)
    early = [(d.kind, d.reason) for d in result.decisions if d.at < 60]
    assert early[0] == ("scale_hold", "needed_for_targets")
    assert "scale_in" not in dict(early)
    assert all(each.attained for each in result.records)


@pytest.mark.parametrize("fast", [0, 1], ids=["first", "second"])
def test_it_sleeps_while_no_one_needs_it_and_keeps_its_requests_once_a_rush_has_woken_it(fast):
    """It costs while it sleeps."""
    instances = (FAST, SLOW) if fast == 0 else (SLOW, FAST)
    demands = [*loose(0, 40), *loose(40, 52, 14, 100), *tight(53, 70)]
    result = run(demands, instances, sleep_level=1, wake_s=1.0)
    slept = [(d.at, d.figures["asleep"]) for d in result.decisions if "asleep" in d.figures]
    woken = [(d.at, d.figures["woken"]) for d in result.decisions if "woken" in d.figures]
    assert slept[0][0] < 40 < woken[0][0] < 53
    assert slept[0][1] == woken[0][1] == f"engine-{fast}"
    assert {each.outcome for each in result.records} == {"ok"}
    assert {each.instance for each in of(result, "tight")} == {f"engine-{fast}"}
    assert all(each.attained for each in of(result, "tight"))
    cost = {use.id: use.provisioned_s for use in result.instances}
    assert set(cost) == {"engine-0", "engine-1"}
    assert min(cost.values()) > 0.98 * result.ended_at


@pytest.mark.parametrize("fast", [0, 1], ids=["first", "second"])
def test_it_is_woken_once_requests_need_it_though_load_is_low(fast):
    """Those that come before it is awake are refused: the other cannot keep them, and waking takes longer than they may
    wait. Then the other one sleeps."""
    instances = (FAST, SLOW) if fast == 0 else (SLOW, FAST)
    result = run([*loose(0, 200), *tight(60, 80)], instances, sleep_level=1, wake_s=1.0)
    slept = [(d.at, d.figures["asleep"]) for d in result.decisions if "asleep" in d.figures]
    ((at, reason, woken),) = [(d.at, d.reason, d.figures["woken"]) for d in result.decisions if "woken" in d.figures]
    assert (reason, woken) == ("needed_asleep", f"engine-{fast}")
    assert 60 <= at <= 62
    assert {each.outcome for each in of(result, "tight", 0, at)} == {"refused"}
    after = of(result, "tight", start_s=at + 2)
    assert len(after) >= 15
    assert {each.instance for each in after} == {f"engine-{fast}"}
    assert all(each.attained for each in [*after, *of(result, "loose")])
    assert [name for _, name in slept] == [f"engine-{fast}", f"engine-{1 - fast}"]
    assert slept[0][0] < 60 < at < slept[1][0]


@pytest.mark.parametrize(("fast", "gateways"), [(0, 1), (1, 1), (0, 3)], ids=["first", "second", "three gateways"])
def test_one_like_it_is_started_once_requests_need_it_though_load_is_low(fast, gateways):
    """It was stopped, and a new instance would be like the first of the settings, which is the slow one in one case."""
    instances = (FAST, SLOW) if fast == 0 else (SLOW, FAST)
    scaling = ElasticSettings(ONE_OR_TWO, start_s=3.0)
    demands = sorted([*loose(0, 200), *tight(60, 100)], key=lambda demand: demand.at)
    result = simulate(demands, instances=instances, gateways=gateways, elastic=scaling)
    stopped = [(d.at, d.figures["instance"]) for d in result.decisions if d.kind == "scale_in"]
    ((at, reason, figures),) = [(d.at, d.reason, d.figures) for d in result.decisions if d.kind == "scale_out"]
    assert (reason, figures["like"]) == ("needed_stopped", f"engine-{fast}")
    assert 60 <= at <= 62
    assert not any(each.attained for each in of(result, "tight", 0, at))
    after = of(result, "tight", start_s=at + scaling.start_s + 3.0)
    assert len(after) >= 30
    assert {each.instance for each in after} == {figures["started"]}
    assert all(each.attained for each in [*after, *of(result, "loose", start_s=at + 10.0)])
    assert [name for _, name in stopped] == [f"engine-{fast}", f"engine-{1 - fast}"]
    assert stopped[0][0] < 60 < at < stopped[1][0]


@pytest.mark.parametrize("fast", [0, 1], ids=["first", "second"])
def test_its_drain_is_taken_back_where_requests_need_it(fast):
    """Each of the two has a long answer to finish."""
    instances = (FAST, SLOW) if fast == 0 else (SLOW, FAST)
    patient = Targets(5.0, 0.3, None, 300.0)
    long = [Demand(f"long{i}", 0.2 + i / 100, 400, 4000, patient, "long", max_tokens=4000) for i in range(2)]
    result = run([*long, *loose(0, 60), *tight(30, 45)], instances, start_s=3.0)
    drained, taken_back = [d for d in result.decisions if d.kind in ("scale_in", "scale_out")][:2]
    assert (drained.kind, drained.figures["instance"]) == ("scale_in", f"engine-{fast}")
    assert (taken_back.reason, taken_back.figures["instance"]) == ("needed_draining", f"engine-{fast}")
    assert drained.at < 30 <= taken_back.at <= 32
    after = of(result, "tight", start_s=taken_back.at + 1)
    assert len(after) >= 12
    assert all(each.attained and each.instance == f"engine-{fast}" for each in after)


@pytest.mark.parametrize("fast", [1, 2], ids=["first", "second"])
def test_one_like_it_is_started_for_its_pace(fast):
    """A step of decode takes 12 ms there and 48 at the other, and from 60 s on answers are allowed 25."""
    decoders = [replace(each, role="decode") for each in ((FAST, SLOW) if fast == 1 else (SLOW, FAST))]
    paced = [
        replace(each, id=f"paced{each.at}", output_tokens=60, max_tokens=60, targets=Targets(5.0, 0.025, None, 20.0))
        for each in tight(60, 100)
    ]
    scaling = ElasticSettings(
        replace(ONE_OR_TWO, role="prefill", max_instances=1), decode=replace(ONE_OR_TWO, role="decode"), start_s=3.0
    )
    demands = sorted([*paced, *loose(0, 120)], key=lambda demand: demand.at)
    result = simulate(demands, instances=(replace(FAST, role="prefill"), *decoders), elastic=scaling)
    gone = [d.figures["instance"] for d in result.decisions if d.kind == "scale_in" and d.at < 60]
    assert gone == [f"engine-{fast}"]
    ((at, like, new),) = [
        (d.at, d.figures["like"], d.figures["started"]) for d in result.decisions if d.reason == "needed_stopped"
    ]
    assert (60 <= at <= 63, like) == (True, f"engine-{fast}")
    after = of(result, "paced", start_s=at + scaling.start_s + 3.0)
    assert len(after) >= 25
    assert all(each.attained and each.instance == new for each in after)


def test_a_client_that_was_refused_is_served_when_it_comes_back():
    """Once a minute, as its refusal says; each time alone, so nothing else keeps the fast one awake."""
    result = run([*loose(0, 260), *tight(60, 61), *tight(120, 121), *tight(180, 181)], (FAST, SLOW), sleep_level=1)
    assert [each.outcome for each in of(result, "tight")] == ["refused", "ok", "ok"]
    assert sum("woken" in d.figures for d in result.decisions) == 1


def test_what_only_it_can_keep_is_refused_while_it_is_away_and_at_no_other_time():
    """It drains at 30 s, with one of its requests still running; its successor is up at 60 s."""
    instances = (SLOW, replace(FAST, until_s=30.2), replace(FAST, from_s=60.0))
    result = run([*tight(0, 90), *loose(0, 90)], instances)
    assert {each.outcome for each in [*of(result, "tight", 0, 31), *of(result, "tight", 60)]} == {"ok"}
    assert {each.instance for each in of(result, "tight", 0, 31)} == {"engine-1"}
    assert {each.instance for each in of(result, "tight", 61)} == {"engine-2"}
    assert all(each.attained for each in of(result, "tight", 0, 31))
    assert all(each.attained for each in of(result, "tight", 61))
    assert {each.outcome for each in of(result, "tight", 31, 60)} == {"refused"}
    assert all(each.attained for each in of(result, "loose"))
    cost = {use.id: use.provisioned_s for use in result.instances}
    assert cost["engine-1"] == pytest.approx(30.4, abs=1.2)
    assert cost["engine-2"] == pytest.approx(result.ended_at - 60.0, abs=0.1)


@pytest.mark.parametrize("sleep_level", [0, 1], ids=["stopped", "asleep"])
@pytest.mark.parametrize("fast", [1, 2], ids=["first", "second"])
def test_one_that_decodes_is_not_scaled_in_while_requests_need_its_pace(fast, sleep_level):
    """A step takes 12 ms there and 48 at the other, and half the answers are allowed 25."""
    decoders = [replace(each, role="decode") for each in ((FAST, SLOW) if fast == 1 else (SLOW, FAST))]
    paced = [
        replace(each, id=f"paced{each.at}", output_tokens=60, max_tokens=60, targets=Targets(5.0, 0.025, None, 20.0))
        for each in tight(0, 60)
    ]
    demands = sorted([*paced, *loose(0, 60)], key=lambda demand: demand.at)
    scaling = ElasticSettings(
        replace(ONE_OR_TWO, role="prefill", max_instances=1),
        decode=replace(ONE_OR_TWO, role="decode"),
        sleep_level=sleep_level,
    )
    result = simulate(demands, instances=(replace(FAST, role="prefill"), *decoders), elastic=scaling)
    gone = [d.figures["instance"] for d in result.decisions if d.kind == "scale_in" and d.at < 60]
    assert gone == [f"engine-{3 - fast}"]
    assert all(each.attained for each in of(result, "loose"))
    assert {each.instance for each in of(result, "paced", start_s=20)} == {f"engine-{fast}"}
    assert all(each.attained for each in of(result, "paced", start_s=20))
