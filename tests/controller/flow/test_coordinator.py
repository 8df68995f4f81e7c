"""The coordinator of pruning: what it prunes of the queues of several gateways, and what it leaves alone."""

import random

import pytest

from controller.core.errors import ConfigError
from controller.core.pruning import (
    ModelQueue,
    PrefillUnit,
    PruneReason,
    PruningOrders,
    QueueReport,
    WaitingPrefill,
    orders_from_json,
    orders_to_json,
    report_from_json,
    report_to_json,
)
from controller.flow.batches import Batch, BatchRequest
from controller.flow.coordinator import Coordinator, CoordinatorConfig
from tests.controller.flow.slow_batches import order_slowly

NOW = 100.0


def waiting(name, due_s, prefill_s, **changes):
    return WaitingPrefill(name, NOW + due_s, prefill_s, 4096, 1.0, **changes)


def report(gateway, *rows, at=NOW, unit=None):
    return QueueReport(gateway, at, [ModelQueue("m", list(rows), [unit or PrefillUnit("w0", 1.0, 0.0)])])


def elsewhere(model="m", at=NOW):
    """A request that waits at another gateway, needs next to nothing and is exempt: without one nothing is pruned."""
    row = WaitingPrefill("elsewhere", NOW + 1e3, 1e-6, 4096, 0.0, exempt=True)
    return QueueReport("other", at, [ModelQueue(model, [row], [])])


def pruned(*reports, budget=1.0, now=NOW):
    config = CoordinatorConfig(drop_budget=budget, trust=1.0)
    return set(Coordinator(config).decide([*reports, elsewhere()], now).scavengers)


def test_nothing_is_pruned_while_all_are_in_time():
    assert pruned(report("a", waiting("x", 1.0, 1.0), waiting("y", 2.0, 1.0))) == set()


def test_the_heaviest_is_pruned_so_that_the_others_are_in_time():
    """Moore-Hodgson where every batch is one prompt: 3 s of work until 2.5 s, so the prompt of 2 s goes."""
    rows = waiting("short", 1.0, 0.5), waiting("long", 2.0, 2.0), waiting("late", 2.5, 0.5)
    found = Coordinator(CoordinatorConfig(1.0, trust=1.0)).decide([report("a", *rows), elsewhere()], NOW)
    assert found.scavengers == {"long": PruneReason("w0", NOW + 3.0, NOW + 2.5)}
    assert (found.waiting, found.batches, found.gateways) == (4, 4, ["a", "other"])


def test_a_queue_at_one_gateway_alone_is_left_to_its_dispatcher():
    rows = waiting("short", 1.0, 0.5), waiting("long", 2.0, 2.0), waiting("late", 2.5, 0.5)
    coordinator = Coordinator(CoordinatorConfig(1.0, trust=1.0))
    for others in ([], [report("b")], [elsewhere("another model")], [elsewhere(at=NOW - 10.0)]):
        found = coordinator.decide([report("a", *rows), *others], NOW)
        assert (found.scavengers, found.waiting) == ({}, 0)


def test_queues_of_two_gateways_are_one_queue():
    """Each alone would be in time, since neither knows what waits at the other."""
    one, two = report("a", waiting("x", 1.0, 0.9)), report("b", waiting("y", 1.1, 0.8))
    assert pruned(one) == pruned(two) == set()
    assert pruned(one, two) == {"x"}


def test_what_gateways_have_sent_goes_first():
    busy = PrefillUnit("w0", 1.0, 0.4)
    one = report("a", waiting("x", 1.5, 0.6), waiting("y", 1.6, 0.3), unit=busy)
    assert pruned(one) == set()
    assert pruned(one, report("b", unit=busy)) == {"x"}


def test_nobody_is_pruned_for_a_batch_that_is_too_late_all_the_same():
    """What was sent takes half a second, so the short prompts are late whatever is pruned; the longer one is not. All
    three were pruned, and then waited behind everything: more missed their targets than without pruning."""
    busy = PrefillUnit("w0", 1.0, 0.5)
    rows = [
        waiting(name, due_s, prefill_s)._replace(prompt_tokens=100)
        for name, due_s, prefill_s in (("short", 0.05, 0.01), ("other", 0.4, 0.01), ("longer", 0.7, 0.1))
    ]
    assert pruned(report("a", *rows, unit=busy)) == set()


def test_a_request_that_an_operator_forced_is_exempt():
    rows = waiting("heavy", 3.0, 2.0), waiting("x", 3.1, 1.0), waiting("late", 3.2, 0.5)
    assert pruned(report("a", *rows)) == {"heavy"}
    assert pruned(report("a", rows[0]._replace(exempt=True), *rows[1:])) == {"x"}


def test_the_budget_bounds_what_is_pruned():
    rows = [waiting(f"r{i}", 1.0, 1.0) for i in range(10)]
    assert len(pruned(report("a", *rows))) == 9
    assert len(pruned(report("a", *rows), budget=0.25)) == 2
    assert pruned(report("a", *rows), budget=0.0) == set()


def test_of_equal_loads_the_one_of_less_value_is_pruned():
    rows = waiting("gold", 1.0, 1.0, value=4.0), waiting("bronze", 1.0, 1.0)
    assert pruned(report("a", *rows)) == {"bronze"}


def test_reports_older_than_three_periods_do_not_count():
    rows = [waiting(f"r{i}", 1.0, 1.0) for i in range(3)]
    assert pruned(report("a", *rows, at=NOW - 3.0)) != set()
    assert pruned(report("a", *rows, at=NOW - 3.1)) == set()


def test_models_do_not_compete():
    other = ModelQueue("n", [waiting("y", 1.0, 1.0)], [PrefillUnit("w1", 1.0, 0.0)])
    mine = report("a", waiting("x", 1.0, 1.0))
    assert pruned(mine._replace(queues=[*mine.queues, other])) == set()


def test_slots_hold_up_too():
    """A prompt of no work waits for a slot: 10 tokens/s, 30 tokens before it."""
    unit = PrefillUnit("w0", 1.0, 0.0, token_rate=10.0)
    rows = [WaitingPrefill(f"r{i}", NOW + 2.0, 0.01, 4096, 15.0) for i in range(2)]
    assert len(pruned(report("a", *rows, unit=unit))) == 1


def test_an_instance_that_only_prefills_is_trusted_whole():
    """1 s of work fits into 1.45 s, but not into 0.65 of them."""
    rows = waiting("x", 1.4, 0.6), waiting("y", 1.45, 0.4)
    coordinator = Coordinator(CoordinatorConfig(1.0, trust=0.65))
    beside_decodes = PrefillUnit("w0", 1.0, 0.0, token_rate=1e6)
    assert not coordinator.decide([report("a", *rows), elsewhere()], NOW).scavengers
    assert set(coordinator.decide([report("a", *rows, unit=beside_decodes), elsewhere()], NOW).scavengers) == {"x"}


def one_by_one(rows, unit):
    """The batches that an instance prefills of these rows, as `order_slowly` takes them."""
    groups = []
    for row in sorted(rows, key=lambda row: row.due):
        if not groups or sum(each.prompt_tokens for each in groups[-1]) + row.prompt_tokens > 2048:
            groups.append([])
        groups[-1].append(row)
    slots = sum(row.slot_tokens for row in rows) / len(rows)
    sent = BatchRequest("", -1e9, {"prefill": unit.backlog_s, "slots": -unit.free_slots * slots}, exempt=True)
    yield Batch("", "w0", 0.0, [sent])
    for number, group in enumerate(groups):
        loads = [{"prefill": row.prefill_s, "slots": row.slot_tokens} for row in group]
        requests = [
            BatchRequest(row.id, row.due, load, row.exempt, row.value) for row, load in zip(group, loads, strict=True)
        ]
        yield Batch(f"{number:03}", "w0", 0.0, requests)


def test_the_same_is_pruned_as_where_every_step_looks_at_everything():
    rng = random.Random(3)
    several = 0
    for _ in range(40):
        rows = []
        for number in range(rng.randint(1, 40)):
            about = rng.random() < 0.1, rng.choice((0.5, 1.0, 2.0))
            due, prefill_s = NOW + rng.uniform(0.0, 6.0), rng.uniform(0.01, 0.5)
            rows.append(
                WaitingPrefill(f"r{number}", due, prefill_s, rng.randint(1, 1500), rng.uniform(1.0, 400.0), *about)
            )
        unit = PrefillUnit("w0", rng.uniform(0.5, 1.0), rng.uniform(0.0, 0.5), rng.uniform(300.0, 3000.0), 2)
        half = PrefillUnit("w0", unit.prefill_rate, unit.backlog_s / 2, unit.token_rate / 2, 1)
        coordinator = Coordinator(CoordinatorConfig(0.5, trust=0.65))
        found = coordinator.decide([report("a", *rows[::2], unit=half), report("b", *rows[1::2], unit=half)], NOW)
        rates = {"prefill": 0.65 * unit.prefill_rate, "slots": 0.65 * unit.token_rate}
        slow = order_slowly([*one_by_one(rows, unit)], rates, len(rows) // 2, NOW, in_vain=False)
        if len(rows) > 1:
            assert [*found.scavengers] == [each.request for each in slow.pruned]
        several += len(found.scavengers) > 1
    assert several > 10


def test_a_model_without_an_instance_is_left_alone():
    empty = QueueReport("a", NOW, [ModelQueue("m", [waiting("x", 0.1, 9.0)], [])])
    assert pruned(empty) == set()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"drop_budget": 1.5}, "drop_budget"), ({"period_s": 0.0}, "period_s"), ({"trust": 0.0}, "trust"),
     ({"batch_tokens": 0}, "batch_tokens")],
)  # fmt: skip
def test_bad_settings_name_their_field(changes, field):
    with pytest.raises(ConfigError) as error:
        CoordinatorConfig(**changes)
    assert error.value.field == field


def test_messages_come_back_as_they_were():
    sent = report("a", waiting("x", 1.0, 1.0))
    assert report_from_json(report_to_json(sent)) == sent
    orders = PruningOrders(3, NOW, NOW + 3, {"x": PruneReason("w0", 1.0, 2.0)}, 1, 1, ["a"], ["y", "z"])
    raw = orders_to_json(orders)
    assert orders_from_json(raw) == orders
    del raw["order"]
    assert orders_from_json(raw).order == [], "of a coordinator of an older release"
    for wrong in ("yz", [1], {"y": 1}):
        with pytest.raises((TypeError, ValueError)):
            orders_from_json({**raw, "order": wrong})
