"""Faults in a fleet that is unlike the demo's: two gateways before three instances of unlike speed and size."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core import events as ev
from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.scale import ScalingConfig
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings
from controller.simulator.fleet.gateways import GatewayGroup
from controller.simulator.fleet.instance import SimulatedInstance
from controller.simulator.settings import ElasticSettings

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
CHAT, DOCUMENTS = Targets(0.6, 0.1, None, 10.0), Targets(3.0, 0.3, None, 20.0)
LATE_S = 12.0
SCALED = ElasticSettings(ScalingConfig("model", min_instances=1, max_instances=3, sustain_s=5.0, cooldown_s=3.0))


def slower(times):
    return LatencyCoefficients(*(times * each for each in A100))


UNLIKE = (
    InstanceSettings(A100, max_num_seqs=64),
    InstanceSettings(slower(2), max_num_seqs=16),
    InstanceSettings(slower(3), max_num_seqs=128),
)


def load(rate=14.0, count=420, seed=5):
    """Chats and documents, for which the slowest instance has room as well; half a minute."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Demand(f"r{i}", float(at[i]), int(rng.integers(1000, 4000)), 30, DOCUMENTS, "documents", max_tokens=30)
        if rng.random() < 0.3
        else Demand(f"r{i}", float(at[i]), int(rng.integers(50, 600)), 60, CHAT, "chat", max_tokens=60)
        for i in range(count)
    ]


def simulate(instances=UNLIKE, elastic=SCALED):
    """Records in the order of arrival, and the decisions of the scaler while requests come."""
    demands = load()
    settings = SimulationSettings(instances, gateways=2, elastic=elastic)
    simulation = Simulation(settings, build_dispatcher("slackline"), demands)
    result = simulation.run()
    records = sorted(result.records, key=lambda record: int(record.id[1:]))
    assert [record.id for record in records] == [demand.id for demand in demands]
    assert not [record.id for record in records if record.outcome is not Outcome.OK]
    return records, [each.kind for each in result.decisions if each.at < demands[-1].at]


def share(records):
    return float(np.mean([record.attained is True for record in records]))


@pytest.fixture(scope="module")
def undisturbed():
    return simulate()


class StartsLate(GatewayGroup):
    """The second gateway starts into the running fleet; until then the first has all of it."""

    def __init__(self, schedulers):
        super().__init__(schedulers)
        self._up, self._alone = {}, True

    def handle(self, events, now):
        came = {event.spec.id: event for event in events if isinstance(event, ev.InstanceUp)}
        self._up |= came
        if now < LATE_S:
            reply = self.schedulers[0].handle(events, now)
            self._wakes[0] = np.inf if reply.wake_at is None else reply.wake_at
            return reply
        if self._alone:
            self._alone = False
            shares = [ev.SharesChanged(name, 1 / 2) for name in self._up]
            actions = self.schedulers[0].handle(shares, now).actions
            self.schedulers[1].handle([*self._up.values(), *shares], now)
            found = super().handle([event for event in events if event not in came.values()], now)
            return found._replace(actions=[*actions, *found.actions])
        return super().handle(events, now)

    def _owner(self, event):
        """What came before the second gateway did stays with the first."""
        if isinstance(event, ev.Arrived):
            return super()._owner(event)
        request_id = event.request.id if isinstance(event, ev.PrefillDone) else getattr(event, "request_id", None)
        return None if request_id is None else self._owners.get(request_id, 0)


def test_a_gateway_that_starts_into_a_running_fleet_loses_nothing(monkeypatch, undisturbed):
    """And the scaler does not take what it has not seen yet for low load."""
    monkeypatch.setattr("controller.simulator.simulation.GatewayGroup", StartsLate)
    records, kinds = simulate()
    assert "scale_in" not in kinds
    assert share(records) >= share(undisturbed[0]) - 0.01


def test_counters_that_reset_cost_nothing(monkeypatch, undisturbed):
    """Each engine's counters begin at 0 once, as after a restart behind its address, at a time of its own."""
    load_of, zero, resets = SimulatedInstance.load, {}, {"engine-0": 8.5, "engine-1": 14.5, "engine-2": 20.5}
    totals = ("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total")

    def told(instance, now):
        seen = load_of(instance, now)
        if now >= resets[instance.id]:
            zero.setdefault(instance.id, seen)
        since = zero.get(instance.id)
        if since is None:
            return seen
        return seen._replace(**{name: getattr(seen, name) - getattr(since, name) for name in totals})

    monkeypatch.setattr(SimulatedInstance, "load", told)
    records, kinds = simulate()
    assert zero.keys() == resets.keys()
    assert zero["engine-2"].prompt_tokens_total > 0
    assert kinds == undisturbed[1]
    assert share(records) >= share(undisturbed[0]) - 0.01


@pytest.mark.parametrize("times", [(4, 0.25, 1), (0.25, 1, 4), (1, 4, 0.25)])
def test_profiles_wrong_by_four_times_either_way_are_learned_within_200_requests(times, undisturbed):
    wrong = tuple(
        replace(each, believed=LatencyCoefficients(*(factor * value for value in each.latency)))
        for each, factor in zip(UNLIKE, times, strict=True)
    )
    records, kinds = simulate(wrong)
    assert "scale_in" not in kinds
    assert share(records[200:]) >= share(undisturbed[0][200:]) - 0.02
    assert share(records[:200]) >= share(undisturbed[0][:200]) - 0.1
