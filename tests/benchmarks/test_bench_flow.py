"""bench-flow runs real flows through the network and orders real batches."""

from benchmarks.bench_flow import BATCH_REQUESTS, BATCHES, batches, plan, simulate
from benchmarks.flow.orders import order_seconds
from benchmarks.flow.permits import echo_seconds, milliseconds, permit_seconds
from controller.flow.flows import FlowStage


def test_all_stages_are_there_and_only_kv_transfers_have_a_deadline():
    flows = [planned.flow for planned in plan(300, 1)]
    assert {flow.stage for flow in flows} == {FlowStage.REUSE, FlowStage.COLLECTIVE, FlowStage.KV_TRANSFER}
    assert all((flow.deadline is not None) == (flow.stage is FlowStage.KV_TRANSFER) for flow in flows)


def test_every_flow_ends():
    assert simulate(300, "mfs", 1) > 0.0


def test_the_batches_have_their_requests():
    made = batches(1)
    assert (len(made), {len(batch.requests) for batch in made}) == (BATCHES, {BATCH_REQUESTS})


def test_a_real_daemon_gives_every_transfer_its_permit():
    took = permit_seconds(100.0, 0.5)
    assert 20 <= len(took) <= 60
    assert 0.0 < took[0] <= took[-1] < 0.5


def test_a_process_that_decides_nothing_echoes_every_line():
    took = echo_seconds(100.0, 0.5)
    assert 20 <= len(took) <= 60
    assert 0.0 < took[0] <= took[-1] < 0.5
    assert milliseconds([0.001, 0.002, 0.003], 50) == 2.0


def test_orders_of_a_real_coordinator_are_enforced():
    took = order_seconds(3)
    assert len(took) == 3
    assert 0.0 < took[0] <= took[-1] < 2.0
