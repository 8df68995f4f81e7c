"""A flow is promoted to the same level as by looking at one level after the other, and with less work."""

from __future__ import annotations

import random

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import DeferAndPromote, FlowState
from controller.flow.urgency import level_of, minimal_link_utilisation

BANDWIDTH = 100.0


class Ports:
    """Loads by port and band, and how often they were asked for."""

    def __init__(self, loads: dict[str, dict[float, float]]) -> None:
        self.loads, self.asked = loads, 0

    def bandwidth(self, port: str) -> float:
        return BANDWIDTH

    def load_before(self, port: str, band: float) -> float:
        self.asked += 1
        return sum(load for other, load in self.loads.get(port, {}).items() if other < band)

    def load(self, port: str) -> float:
        return sum(self.loads.get(port, {}).values())

    def request_left(self, flow: MsFlow) -> float:
        return flow.size_bytes

    def current_layer(self, flow: MsFlow) -> int:
        return 0

    def batch_rank(self, flow: MsFlow) -> float:
        return 0.0


def kv(size: float, deadline: float) -> FlowState:
    return FlowState(MsFlow("f", FlowStage.KV_TRANSFER, size, "out", "in", deadline=deadline), 1, 0.0)


def one_level_after_the_other(policy: DeferAndPromote, state: FlowState, ports: Ports, now: float) -> int:
    level, flow = state.level or policy.config.levels, state.flow
    while level > 1:
        worst = max(
            minimal_link_utilisation(
                flow.size_bytes,
                (flow.deadline or 0.0) - now,
                BANDWIDTH,
                ports.load(port) if policy.config.load_of == "all" else ports.load_before(port, float(level)),
            )
            for port in ("out", "in")
        )
        if level_of(worst, policy.config.thresholds) >= level:
            break
        level -= 1
    return level


def test_levels_are_those_of_one_after_the_other():
    rng, reached = random.Random(1), set()
    for number in range(4000):
        policy = DeferAndPromote(DeferAndPromote.Config(load_of=rng.choice(("before", "all"))))
        bands = {float(band): rng.choice((0.0, rng.uniform(0, 0.3))) for band in rng.sample(range(9), 3)}
        ports = Ports({port: bands for port in ("out", "in") if rng.random() < 0.6})
        state = kv(10 ** rng.uniform(-5, 3), rng.uniform(0.5, 2.0))
        state.level = rng.choice((0, 0, rng.randint(1, 8)))
        expected = one_level_after_the_other(policy, state, ports, 0.25)
        policy.turn(state, ports, 0.25, True)
        assert state.level == expected, number
        reached.add(expected)
    assert reached == set(range(1, 9))


def test_without_load_a_level_is_found_with_one_look_at_each_port():
    ports, state = Ports({}), kv(90.0, 1.0)
    DeferAndPromote().turn(state, ports, 0.0, True)
    assert state.level == 1
    assert ports.asked == 2
