"""bench-flow runs real flows through the network, orders real batches, and prints its figures as JSON last."""

import json

import pytest

from benchmarks import bench_flow
from benchmarks.bench_flow import BATCH_REQUESTS, BATCHES, batches, plan, simulate
from benchmarks.flow.permits import milliseconds
from benchmarks.flow.pruned_queues import DROP_BUDGET, decide_ms
from controller.flow.flows import FlowStage

MEASURED = ("permit_seconds", "echo_seconds", "order_seconds")


def kept(name, measure, took):
    """The same measurement, whose result is also kept."""
    return lambda *given: took.setdefault(name, measure(*given))


@pytest.fixture(scope="module")
def quick():
    """A whole QUICK run of tiny sizes: what it prints last, and the seconds that each part measured."""
    lines, took = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUICK", "1")
        patch.delenv("BENCH_NICE", raising=False)
        patch.setattr("sys.argv", ["bench_flow"])
        sizes = {"QUICK_FLOWS": 300, "QUICK_ORDERS": 3, "BATCHES": 40, "PERMITS_A_SECOND": 100.0, "PERMITS_S": 0.5}
        for name, size in sizes.items():
            patch.setattr(bench_flow, name, size)
        for name in MEASURED:
            patch.setattr(bench_flow, name, kept(name, getattr(bench_flow, name), took))
        patch.setattr("builtins.print", lambda text, **how: lines.append(text))
        bench_flow.main()
    return json.loads(lines[-1]), took


def test_its_last_line_has_the_figures_that_are_asked_for(quick):
    told, took = quick
    asked = ("sim_s", "sim_peak_mb", "permit_p99_ms", "coordinator_ms", "links_order_ms", "order_p95_ms")
    assert all(told[name] > 0.0 for name in asked), told
    assert told["permit_p99_ms"] == milliseconds(took["permit_seconds"], 99)
    assert told["order_p95_ms"] <= 1e3 * took["order_seconds"][-1] + 0.1
    assert (told["flows"], told["policy"], told["seed"]) == (300, "mfs", 1)


def test_all_stages_are_there_and_only_kv_transfers_have_a_deadline():
    flows = [planned.flow for planned in plan(300, 1)]
    assert {flow.stage for flow in flows} == {FlowStage.REUSE, FlowStage.COLLECTIVE, FlowStage.KV_TRANSFER}
    assert all((flow.deadline is not None) == (flow.stage is FlowStage.KV_TRANSFER) for flow in flows)


def test_the_decision_is_timed_on_a_thousand_batches_with_the_settings_of_the_job():
    found = decide_ms(seed=1, passes=1)
    assert min(found.wall_ms, found.cpu_ms) > 0.0
    assert found.found.waiting == 8_000
    assert 1_000 <= found.found.batches < 1_100
    assert 0.45 * 8_000 < len(found.found.scavengers) <= DROP_BUDGET * 8_000


def test_kv_that_leaves_and_comes_can_be_timed_too():
    found = decide_ms(seed=1, passes=1, requests=400, receivers=3).found
    assert found.waiting == 400 + 2 * 8 * 5, "five of each instance at each of two gateways have KV on the way"
    assert found.scavengers


def test_every_flow_ends():
    assert simulate(300, "mfs", 1) > 0.0


def test_the_batches_have_their_requests():
    made = batches(1)
    assert (len(made), {len(batch.requests) for batch in made}) == (BATCHES, {BATCH_REQUESTS})


def test_a_real_daemon_gives_every_transfer_its_permit(quick):
    took = quick[1]["permit_seconds"]
    assert 20 <= len(took) <= 60
    assert 0.0 < took[0] <= took[-1] < 0.5


def test_a_process_that_decides_nothing_echoes_every_line(quick):
    took = quick[1]["echo_seconds"]
    assert 20 <= len(took) <= 60
    assert 0.0 < took[0] <= took[-1] < 0.5
    assert milliseconds([0.001, 0.002, 0.003], 50) == 2.0


def test_orders_of_a_real_coordinator_are_enforced(quick):
    took = quick[1]["order_seconds"]
    assert len(took) == 3
    assert 0.0 < took[0] <= took[-1] < 2.0
