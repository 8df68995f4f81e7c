"""Instances that are starting count in the plan of what can be in time: what one of them will keep is not deferred."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core import events as ev
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher, lane, supply
from controller.dispatch.expected import ExpectedInstances
from controller.scale import ScalingConfig
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings
from controller.simulator.settings import ElasticSettings

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
SCALING = ScalingConfig("model", min_instances=1, max_instances=2, sustain_s=5.0, cooldown_s=3.0)


def burst() -> list[Demand]:
    """Eight seconds of long prompts that are due in 10 s, and twelve of short ones that are due in 16 s."""
    long = [Demand(f"l{i}", 0.5, 4000, 10, Targets(10.0, 2.0, None, 60.0), "long", max_tokens=10) for i in range(34)]
    short = [
        Demand(f"s{i}", 0.5 + i / 400, 500, 10, Targets(16.0, 2.0, None, 60.0), "short", max_tokens=10)
        for i in range(400)
    ]
    return sorted([*long, *short], key=lambda each: (each.at, each.id))


def attained(*, coming: bool, start_s: float) -> dict[str, float]:
    """By class, of a burst on one instance while a second takes so long to start."""
    dispatcher = build_dispatcher("slackline", {"ordering": {"coming": coming}})
    elastic = ElasticSettings(SCALING, load_s={"disk": 1.0, "device": 1.0, "host": 1.0}, start_s=start_s)
    settings = SimulationSettings((InstanceSettings(A100, max_num_seqs=64),), elastic=elastic)
    records = Simulation(settings, dispatcher, burst()).run().records
    by_class = {name: [each.attained for each in records if each.slo_class == name] for name in ("long", "short")}
    return {name: sum(kept) / len(kept) for name, kept in by_class.items()}


def test_what_an_instance_that_is_starting_will_keep_is_not_deferred() -> None:
    """In mid-burst a second instance takes five seconds to serve, in time for all. Deferred for what one instance can
    do, the long prompts went behind the short ones, and were too late when it came."""
    without, with_it = (attained(coming=coming, start_s=4.0) for coming in (False, True))
    assert (without["short"], with_it["short"]) == (1.0, 1.0)
    assert without["long"] < 0.7
    assert with_it["long"] == 1.0


@pytest.mark.parametrize("late_s", [1.0, 3.0])
def test_it_is_not_deferred_either_if_that_instance_serves_later_than_predicted(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live prediction is a median, and ends with the engine's start, of which gateways hear seconds later."""
    changes = ExpectedInstances.changes

    def early(self: ExpectedInstances, joins: Any, on_demand: Any = (), serving: Any = ()) -> list[ev.Expected]:
        return changes(self, joins, on_demand, [(model, at - late_s) for model, at in serving])

    monkeypatch.setattr(ExpectedInstances, "changes", early)
    monkeypatch.setattr(lane, "SHORT_START_S", 0.0)
    assert attained(coming=True, start_s=4.0)["long"] == 1.0
    monkeypatch.setattr(supply, "LATE_S", 0.0)
    without = attained(coming=True, start_s=4.0)["long"]
    assert without < 0.8 if late_s >= 3.0 else without == 1.0


@pytest.mark.parametrize("start_s", [30.0, 2.5], ids=["it comes too late for them", "it comes within seconds"])
def test_others_change_nothing(start_s: float) -> None:
    without, with_it = (attained(coming=coming, start_s=start_s) for coming in (False, True))
    assert with_it == without
