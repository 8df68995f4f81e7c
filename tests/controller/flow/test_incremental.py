"""Looking only at what has changed decides as looking at everything does, over random sequences of events."""

from __future__ import annotations

import random

import pytest

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import GATED, Gate, GateConfig, Go
from controller.flow.policies import FLOW_POLICIES, DeferAndPromote
from controller.flow.scheduler import (
    BatchComputed,
    BatchQueued,
    Ended,
    FlowHeld,
    FlowProgress,
    FlowScheduler,
    FlowSchedulerConfig,
    LayerNeeded,
    LayerStarted,
    OrderSent,
    PortSeen,
    Pressed,
    Submitted,
)
from controller.flow.sorted_items import SortedItems
from tests.controller.flow.full_recomputation import FullGate, FullScheduler

RATE = 100.0  # bytes/s of each port
CONFIGS = [
    {"level_one": 1.0},
    {"load_of": "all"},
    {"late": "first", "bytes_of": "flow", "most_load": 1.0},
    {"within": "least"},
]
POLICIES = {name: FLOW_POLICIES[name] for name in FLOW_POLICIES} | {
    f"mfs {config}": lambda config=config: DeferAndPromote(DeferAndPromote.Config(**config)) for config in CONFIGS
}


def flow_of(rng, name, now, ports=("out", "out", "memory")):
    stage = rng.choice([1, 2, 3, 3, 3, 3, 4])
    due = now + rng.choice([rng.uniform(0.01, 2.0), rng.uniform(1.0, 40.0)]) if stage == 3 else None
    requests = () if rng.random() < 0.4 else (f"r{rng.randrange(8)}",)
    return MsFlow(
        name, FlowStage(stage), rng.uniform(0.1, 60.0), rng.choice(ports), rng.choice("abcd"), f"u{rng.randrange(3)}",
        f"b{rng.randrange(4)}", requests, rng.randrange(8), due, rng.choice([0.0, 5.0]),
    )  # fmt: skip


# ---- the scheduler --------------------------------------------------------------------------------------------------


def an_event(rng, now, live, number, gated):
    unit, batch = f"u{rng.randrange(3)}", f"b{rng.randrange(4)}"
    ports = rng.choice(["out", "memory", *"abcd"])
    rates = {rng.choice([0.0, 1.0, 2.0, 3.0, 5.0, 9.0]): rng.uniform(0.0, 60.0) for _ in range(rng.randrange(3))}
    order = OrderSent(
        rng.randrange(number + 1), rng.sample(["b0", "b1", "b2", "b3"], 3), frozenset({f"r{rng.randrange(8)}"}),
        now + rng.uniform(-0.1, 2.0),
    )  # fmt: skip
    of_all = [
        PortSeen(ports, RATE if rng.random() < 0.95 else rng.uniform(50.0, 120.0), rates),
        BatchQueued(unit, batch, rng.randrange(1, 9)),
        LayerStarted(unit, batch, rng.randrange(8)),
        BatchComputed(unit, batch),
    ]
    if not live or rng.random() < 0.3:
        live.append(f"f{number}")
        return Submitted(flow_of(rng, live[-1], now))
    one = rng.choice(live)
    if rng.random() < 0.1:
        live.remove(one)
        return Ended(one)
    left = FlowProgress(one, rng.uniform(0.0, 40.0))
    held = FlowHeld(one, rng.random() < 0.5, now) if gated else left
    of_all.append(LayerNeeded(one, rng.randrange(8)))
    return rng.choice([*of_all, left, left, held, held, order, Pressed(one) if rng.random() < 0.1 else order])


@pytest.mark.sampled(15)
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_scheduler_that_looks_at_what_changed_gives_the_same_turns(name, lazy, seed):
    policy = POLICIES[name]
    rng, now, live, given = random.Random(seed), 0.0, [], 0
    config = FlowSchedulerConfig(0.05, lazy=lazy)
    one, all_ = FlowScheduler(policy(), config), FullScheduler(policy(), config)
    events = [PortSeen(port, RATE) for port in ("out", "memory", *"abcd")]
    for number in range(400):
        now += rng.choice([0.0, rng.uniform(0.0, 0.01), rng.uniform(0.01, 0.2)])
        for each in range(rng.randrange(5)):
            events.append(an_event(rng, now, live, 10 * number + each, name.split()[0] in GATED))
        (turns, wake_at), (expected, full_wake_at) = one.handle(events, now), all_.handle(events, now)
        assert sorted(map(repr, turns)) == sorted(map(repr, expected)), now
        if not lazy:
            assert wake_at == pytest.approx(full_wake_at), now
        events, given = [], given + len(turns)
    assert given > 200


# ---- the gate -------------------------------------------------------------------------------------------------------


class Both:
    """The gate and one that looks at everything, which are told the same."""

    def __init__(self, policy, seed):
        self.rng, self.now, self.number, self.told = random.Random(seed), 0.0, 0, 0
        self.left, self.going = {}, set()
        config = GateConfig(
            lease_s=self.rng.choice([1.0, 5.0]), settle_s=self.rng.choice([0.05, 0.3]),
            retest_s=self.rng.choice([0.3, 2.0]), slice_s=self.rng.choice([0.03, 0.1]),
        )  # fmt: skip
        scheduling = FlowSchedulerConfig(0.02, lazy=True)
        self.gates = [
            Gate(FlowScheduler(policy(), scheduling), RATE, config),
            FullGate(FullScheduler(policy(), scheduling), RATE, config),
        ]

    def tell(self, what, *args):
        one, all_ = (getattr(gate, what)(*args) for gate in self.gates)
        assert one == all_, (what, args)

    def event(self):
        rng, unit, batch = self.rng, f"u{self.rng.randrange(3)}", f"b{self.rng.randrange(4)}"
        kind, one = rng.random(), rng.choice([*self.left, ""])
        if kind < 0.3 and len(self.left) < 60:
            self.number += 1
            flow = flow_of(rng, f"f{self.number}", self.now)
            self.left[flow.id] = flow.size_bytes
            self.tell("submit", flow, self.now)
        elif kind < 0.65 and one:
            if one in self.going:
                self.left[one] -= rng.uniform(0.0, 8.0)
            self.tell("progress", one, self.left[one], rng.random() < 0.2, self.now)
        elif kind < 0.75 and one:
            self.tell("end", one)
            del self.left[one]
        elif kind < 0.78:
            self.tell("press", one)
        elif kind < 0.92:
            self.tell("layer_started", unit, batch, rng.randrange(8), self.now)
        else:
            self.tell("computed", unit, batch)

    def step(self):
        self.now += self.rng.choice([self.rng.uniform(5e-4, 3e-3), self.rng.uniform(0.005, 0.2)])
        (actions, _), (expected, _) = (gate.step(self.now) for gate in self.gates)
        assert sorted(map(repr, actions)) == sorted(map(repr, expected)), self.now
        for action in actions:
            self.told += 1
            if not isinstance(action, Go):
                self.left.pop(action.flow_id)
            elif action.go:
                self.going.add(action.flow_id)
            else:
                self.going.discard(action.flow_id)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [name for name in POLICIES if name.split()[0] in GATED])
@pytest.mark.parametrize("seed", range(4))
def test_a_gate_that_looks_at_what_changed_tells_flows_the_same(name, seed):
    both = Both(POLICIES[name], seed)
    for _ in range(400):
        for _ in range(both.rng.randrange(6)):
            both.event()
        both.step()
    assert both.told > 200


def test_flows_that_nothing_happens_to_are_not_looked_at(monkeypatch):
    """With 300 that are held behind one, a step for one more transfer takes the turns of a few."""
    gate = Gate(FlowScheduler(DeferAndPromote(), FlowSchedulerConfig(0.02, lazy=True)), RATE)
    for number in range(300):
        flow = MsFlow(f"f{number}", FlowStage.KV_TRANSFER, 100.0, "out", "a", deadline=1e5 + number)
        assert gate.submit(flow, 0.0) is None
    gate.step(0.0)
    gate.step(0.05)
    looked, turn = [], DeferAndPromote.turn

    def counted(self, state, *rest):
        looked.append(state.flow.id)
        return turn(self, state, *rest)

    monkeypatch.setattr(DeferAndPromote, "turn", counted)
    for number in range(10):
        now = 0.06 + number * 0.03
        flow = MsFlow(f"new{number}", FlowStage.KV_TRANSFER, 1.0, "out", "a", deadline=now + 1.0)
        assert gate.submit(flow, now) is None
        gate.step(now)
        gate.end(flow.id)
    assert len(looked) <= 40


def test_what_is_ranked_is_found_between_keys_after_it_moved_and_left():
    rng, ranked, keys = random.Random(1), SortedItems(), {}
    for _ in range(2000):
        number = rng.randrange(40)
        if rng.random() < 0.7:
            keys[number] = rng.randrange(20)
            ranked.put(keys[number], number, f"i{number}")
        else:
            ranked.drop(number)
            keys.pop(number, None)
        after, until = sorted((rng.randrange(-1, 21), rng.randrange(-1, 21)))
        ordered = sorted((key, each) for each, key in keys.items())
        assert ranked.between(after, until) == [f"i{each}" for key, each in ordered if after < key <= until]
        assert list(ranked.backwards(until)) == [(key, f"i{each}") for key, each in reversed(ordered) if key <= until]
        assert ranked.first_key() == (ordered[0][0] if ordered else None)
        if rng.random() < 0.01:
            assert ranked.take(until) == [f"i{each}" for key, each in ordered if key <= until]
            keys = {each: key for each, key in keys.items() if key > until}
        assert len(ranked) == len(keys)
