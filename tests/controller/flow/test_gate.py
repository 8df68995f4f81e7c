"""Who may send, in time: rates are what the test says that senders reach, everything else is the gate's own."""

import math

import pytest

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import Expired, Gate, GateConfig, Go
from controller.flow.policies import FLOW_POLICIES
from controller.flow.scheduler import FlowScheduler, FlowSchedulerConfig

RATE = 100.0  # bytes/s of each port
STEP = 0.05


class Host:
    """Senders of one host over a port of RATE: those that go share it as TCP would, equally, up to their own limits."""

    def __init__(self, policy="mfs", **config):
        self.gate = Gate(
            FlowScheduler(FLOW_POLICIES[policy](), FlowSchedulerConfig(0.02, lazy=True)), RATE, GateConfig(**config)
        )
        self.now = 0.0
        self.left, self.limits, self.going, self.levels = {}, {}, {}, {}
        self.waiting, self.ended, self.expired, self.silent = set(), {}, [], set()

    def add(self, name, size, due=None, *, stage=FlowStage.KV_TRANSFER, to="b", limit=math.inf):
        flow = MsFlow(name, stage, size, "out", to, deadline=due)
        assert self.gate.submit(flow, self.now) is None
        self.left[name], self.limits[name], self.going[name] = size, limit, False
        self.step()

    def step(self):
        for action in self.gate.step(self.now)[0]:
            if isinstance(action, Go):
                self.going[action.flow_id] = action.go
                self.levels.setdefault(action.flow_id, []).append(action.turn.wire_class + 1)
            elif isinstance(action, Expired):
                self.expired.append(action.flow_id)

    def run(self, until):
        while self.now < until - 1e-9:
            for name, rate in self.rates().items():
                self.left[name] -= rate * STEP
            self.now += STEP
            for name in [name for name, left in self.left.items() if left <= 1e-9]:
                self.ended[name] = self.now
                del self.left[name]
                self.gate.end(name)
            for name in self.left.keys() - self.silent:
                self.gate.progress(name, self.left[name], name in self.waiting, self.now)
            self.step()

    def rates(self):
        sending = {name for name in self.left if self.going[name] and name not in self.waiting}
        rates, room, open_ = {}, RATE, sorted(sending, key=lambda name: self.limits[name])
        for place, name in enumerate(open_):
            rates[name] = min(self.limits[name], room / (len(open_) - place))
            room -= rates[name]
        return rates


def test_the_transfer_that_is_due_first_goes_alone_and_the_next_one_follows():
    host = Host("earliest_deadline")
    host.add("late", 100, due=30.0)
    host.add("early", 100, due=3.0)
    assert host.going == {"late": False, "early": True}
    host.run(5.0)
    assert host.ended == {"early": pytest.approx(1.0, abs=0.1), "late": pytest.approx(2.0, abs=0.1)}


def test_a_deferred_transfer_is_promoted_as_its_slack_shrinks_and_ends_in_time():
    host = Host()
    host.add("large", 300, due=100.0)
    host.add("small", 50, due=2.0)
    assert host.going == {"large": False, "small": True}
    host.run(12.0)
    assert host.ended["small"] == pytest.approx(0.5, abs=0.1)
    assert host.ended["large"] == pytest.approx(3.5, abs=0.2)
    held = Host()
    held.add("deferred", 100, due=60.0)
    for number in range(12):
        held.add(f"{number}", 100, due=held.now + 3.0)
        held.run(held.now + 1.0)
    held.run(40.0)
    assert held.levels["deferred"] == sorted(held.levels["deferred"], reverse=True), "it only ever rises"
    assert held.ended["deferred"] < 60.0


def test_equal_ranks_go_together():
    host = Host("fair_sharing")
    host.add("one", 100, due=9.0)
    host.add("two", 100, due=1.0)
    assert host.going == {"one": True, "two": True}
    host.run(5.0)
    assert host.ended == {"one": pytest.approx(2.0, abs=0.1), "two": pytest.approx(2.0, abs=0.1)}


def test_a_flow_that_waits_for_its_computing_leaves_the_port_to_the_next():
    host = Host("earliest_deadline")
    host.add("first", 100, due=3.0)
    host.add("second", 100, due=30.0)
    host.waiting.add("first")
    host.run(0.5)
    assert host.going["second"]
    assert host.left["second"] == pytest.approx(60, abs=10)
    host.waiting.clear()
    host.run(0.6)
    assert not host.going["second"]


def test_a_flow_that_cannot_fill_its_port_is_filled_up_by_the_next():
    host = Host("earliest_deadline")
    host.add("slow", 100, due=9.0, to="b", limit=20.0)
    host.add("next", 100, due=30.0, to="c")
    host.run(1.0)
    assert host.going == {"slow": True, "next": True}
    host.run(4.0)
    assert host.ended["next"] < 2.5


def test_a_flow_that_became_faster_gets_its_port_back():
    host = Host("earliest_deadline")
    host.add("first", 1000, due=9.0, limit=20.0)
    host.add("next", 1000, due=30.0)
    host.run(1.5)
    assert host.going["next"]
    host.limits["first"] = math.inf
    host.run(5.0)
    assert not host.going["next"]


def test_weight_loads_have_their_floor_and_end_under_overload():
    host = Host()
    host.add("weights", 20, stage=FlowStage.WEIGHTS)
    host.add("kv", 10_000, due=1000.0)
    host.run(60.0)
    assert "weights" in host.ended
    assert host.ended["weights"] > 4.0, "5 % of the port, and not more"


def test_weight_loads_share_their_floor_and_take_turns():
    host, loads = Host(), [f"weights{number}" for number in range(6)]
    for name in loads:
        host.add(name, 10_000, stage=FlowStage.WEIGHTS)
    host.add("kv", 100_000, due=2000.0)
    host.run(60.0)
    moved = [10_000 - host.left[name] for name in loads]
    assert all(moved)
    assert sum(moved) < 0.08 * 60.0 * RATE
    assert max(moved) < 2 * min(moved)


def levels_of(host, name):
    return list(dict.fromkeys(host.levels[name]))


def test_a_transfer_is_promoted_when_a_layer_begins_and_at_intervals_once_it_is_computed():
    host = Host(lease_s=1000.0)
    flow = MsFlow("kv", FlowStage.KV_TRANSFER, 100.0, "out", "b", "unit", "batch", deadline=64.0)
    assert host.gate.submit(flow, 0.0) is None
    host.left["kv"], host.limits["kv"], host.going["kv"] = 100.0, 0.0, False
    host.gate.layer_started("unit", "batch", 0, 0.0)
    host.step()
    first = levels_of(host, "kv")
    host.run(50.0)
    assert levels_of(host, "kv") == first, "it has become urgent meanwhile, but no layer began"
    host.gate.layer_started("unit", "batch", 1, host.now)
    host.step()
    second = levels_of(host, "kv")
    assert second[-1] < first[-1]
    host.run(61.0)
    assert levels_of(host, "kv") == second
    host.gate.computed("unit", "batch")
    host.step()
    host.run(63.9)
    assert levels_of(host, "kv")[-1] == 1
    assert not host.gate.computed("unit", "batch"), "again"


def test_a_batch_of_which_no_layer_begins_any_more_does_not_keep_its_transfers_low():
    host = Host(lease_s=2.0)
    flow = MsFlow("kv", FlowStage.KV_TRANSFER, 100.0, "out", "b", "unit", "batch", deadline=16.0)
    assert host.gate.submit(flow, 0.0) is None
    host.left["kv"], host.limits["kv"], host.going["kv"] = 100.0, 0.0, False
    host.gate.layer_started("unit", "batch", 0, 0.0)
    host.run(1.9)
    first = levels_of(host, "kv")
    host.run(15.0)
    assert levels_of(host, "kv")[-1] < first[-1]


def test_transfers_of_no_request_do_not_count_for_each_other():
    """Each of them is as urgent as one that names its own request."""
    told, named = Host(), Host()
    for number in range(20):
        told.add(f"kv{number}", 100, due=1000.0)
        flow = MsFlow(f"kv{number}", FlowStage.KV_TRANSFER, 100, "out", "b", requests=(f"r{number}",), deadline=1000.0)
        assert named.gate.submit(flow, 0.0) is None
        named.left[flow.id], named.limits[flow.id], named.going[flow.id] = 100, math.inf, False
        named.step()
    assert told.levels == named.levels


def test_short_memory_goes_before_everything():
    host = Host("shortest_first")
    host.add("small", 100, due=9.0)
    host.add("large", 1000, due=9.0)
    assert not host.going["large"]
    assert host.gate.press("large")
    host.step()
    assert host.going == {"small": False, "large": True}
    assert not host.gate.press("unknown")


def test_a_flow_of_which_nothing_is_heard_loses_its_turn():
    host = Host("earliest_deadline", lease_s=2.0)
    host.add("gone", 100, due=3.0, limit=0.0)
    host.silent.add("gone")
    host.add("next", 400, due=30.0)
    host.run(2.5)
    assert host.expired == ["gone"]
    assert host.going["next"]


def test_wrong_submits_name_their_field():
    host = Host()
    host.add("one", 10, due=5.0)
    twice = host.gate.submit(MsFlow("one", FlowStage.KV_TRANSFER, 1, "out", "b", deadline=9.0), 0.0)
    past = host.gate.submit(MsFlow("two", FlowStage.KV_TRANSFER, 1, "out", "b", deadline=1.0), 2.0)
    assert (twice.field, past.field) == ("id", "deadline")
    for name, wrong in (("lease_s", 0), ("spare", 0), ("spare", 2)):
        with pytest.raises(ConfigError) as raised:
            GateConfig(**{name: wrong})
        assert raised.value.field == name
    with pytest.raises(ConfigError):
        Gate(FlowScheduler(), 0.0)


def test_an_idle_gate_asks_for_no_call():
    host = Host()
    assert host.gate.step(0.0) == ([], math.inf)
    host.add("one", 10, due=5.0)
    host.run(1.0)
    assert host.gate.step(host.now) == ([], math.inf)


def test_what_is_queued_is_what_requests_have_left_to_send_now():
    host = Host()
    host.add("kv", 100, due=30.0)
    host.gate.submit(MsFlow("reuse", FlowStage.REUSE, 50, "out", "b", deadline=30.0, unit="u", batch="b"), 0.0)
    host.add("weights", 1000, stage=FlowStage.WEIGHTS)
    assert host.gate.queued_bytes("out") == 150
    assert host.gate.queued_bytes("memory") == 0
    host.gate.progress("kv", 60, False, 0.1)
    host.gate.progress("reuse", 50, True, 0.1)
    assert host.gate.queued_bytes("out") == 60
