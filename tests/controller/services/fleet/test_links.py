"""Rows of links follow what engines report; KV transfers become rows with the record of their request, once."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from controller.core.kv_links import LinkReport, LinkState
from controller.models import Decision, InstanceLink, KvTransfer, Link
from controller.selectors.fleet.links import instance_links, kv_transfers, link_counts
from controller.selectors.partitions import TRANSFERS, partitions
from controller.services.fleet.instance_links import instance_links_observe, instance_links_retain
from controller.services.records.partitions import partitions_make, records_retain
from tests import factories

pytestmark = pytest.mark.django_db

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MODELS = {"p": "demo", "d": "demo"}


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def report(state: LinkState = LinkState.UP, peer: str = "p", **fields: Any) -> LinkReport:
    return LinkReport(peer, state, 0.001, 1e9, **fields)


def look(seconds: float, *reports: LinkReport, silent: tuple[str, ...] = (), models: Any = MODELS) -> list[str]:
    """Kinds of the decisions it led to."""
    heard = {} if "d" in silent else {"d": reports}
    return [each.kind for each in instance_links_observe(heard=heard, silent=silent, models=models, at=at(seconds))]


def the_link() -> InstanceLink:
    return instance_links().get()


# ---- links ----------------------------------------------------------------------------------------------------------


def test_a_link_that_is_reported_becomes_a_row():
    look(0, report())
    row = the_link()
    assert (row.source, row.target, row.model, row.state) == ("p", "d", "demo", "up")
    assert (row.bandwidth_bytes_s, row.latency_s, row.closed_at) == (1e9, 0.001, None)


def test_one_that_nothing_happens_to_is_written_every_five_seconds():
    look(0, report())
    look(2, report(bytes=100))
    assert the_link().bytes == 0
    look(5, report(bytes=300, transfers=3))
    assert (the_link().bytes, the_link().transfers, the_link().observed_at) == (300, 3, at(5))


def test_a_look_at_which_nothing_changed_is_three_queries_whatever_the_size(django_assert_num_queries):
    peers = [f"p{n}" for n in range(20)]
    models = dict.fromkeys(("d", *peers), "demo")
    said = [report(peer=peer) for peer in peers]
    look(0, *said, models=models)
    before = list(InstanceLink.objects.order_by("pk").values())
    assert {row["source"] for row in before} == set(peers)
    with django_assert_num_queries(3):
        decided = look(1, *said, models=models)
    assert decided == []
    assert list(InstanceLink.objects.order_by("pk").values()) == before


def test_a_change_of_state_is_written_at_once_with_its_error():
    look(0, report())
    look(1, report(LinkState.DEGRADED, failures=1, last_error="cut"))
    row = the_link()
    assert (row.state, row.since, row.failures, row.last_error, row.error_at) == ("degraded", at(1), 1, "cut", at(1))


def test_down_for_three_seconds_is_a_decision_and_its_end_another():
    assert look(0, report()) == []
    decided = [look(second, report(LinkState.DOWN, last_error="refused")) for second in range(1, 7)]
    assert decided == [[], [], [], ["link_down"], [], []]
    assert look(7, report(LinkState.DEGRADED, last_error="refused")) == ["link_up"]
    down, up = Decision.objects.order_by("pk")
    assert (down.subject, down.actor, down.inputs["error"]) == ("p to d", "links", "refused")
    assert up.inputs["down_s"] == 6.0


def test_a_short_break_is_none():
    look(0, report())
    look(1, report(LinkState.DOWN))
    assert look(2, report()) == []
    assert the_link().since == at(2)


def test_links_of_an_engine_that_does_not_answer_are_down():
    look(0, report())
    look(1, silent=("d",))
    assert (the_link().state, the_link().last_error) == ("down", "its engine does not answer")


@pytest.mark.parametrize("gone", ["p", "d"])
def test_when_either_end_leaves_it_is_closed_and_a_new_one_is_another_row(gone):
    look(0, report())
    left = {name: model for name, model in MODELS.items() if name != gone}
    instance_links_observe(heard={"d": [report()]} if gone == "p" else {}, models=left, at=at(1))
    assert not instance_links().exists()
    assert InstanceLink.objects.get().closed_at == at(1)
    look(2, report())
    assert (InstanceLink.objects.count(), the_link().created_at) == (2, at(2))


def test_a_peer_that_no_one_knows_is_no_row():
    look(0, report(peer="stranger"))
    assert InstanceLink.objects.count() == 0


def test_it_knows_the_described_link_that_it_runs_over():
    near, far = factories.host(), factories.host()
    factories.instance(id="p", host=far)
    factories.instance(id="d", host=near)
    narrow = Link.objects.create(source=far, target=near, bandwidth_bytes_s=1e9, medium="tcp")
    wide = Link.objects.create(source=far, target=near, bandwidth_bytes_s=2e9, medium="rdma")
    look(0, report())
    assert the_link().link_id == wide.pk != narrow.pk


def test_closed_links_are_forgotten_after_their_days_and_open_ones_never():
    look(0, report())
    instance_links_observe(heard={}, models={}, at=at(1))
    look(2, report())
    assert instance_links_retain(days=3, now=at(3 * 86_400)) == 0
    assert instance_links_retain(days=3, now=at(3 * 86_400 + 2)) == 1
    assert InstanceLink.objects.count() == 1
    with pytest.raises(ValueError, match="days"):
        instance_links_retain(days=0)


def test_counts_by_state():
    models = dict.fromkeys(("d", "p", "q", "r"), "demo")
    look(0, report(), report(LinkState.DOWN, "q"), report(LinkState.DOWN, "r"), models=models)
    counts = link_counts()
    assert (counts.up, counts.down, counts.connecting, counts.all) == (1, 2, 0, 3)


# ---- transfers ------------------------------------------------------------------------------------------------------


def step(reason: str = "kv_landed", after: float = 2.0, **figures: Any) -> dict[str, Any]:
    told = {
        "instance": "d", "source": "p", "attempt": 1, "outcome": "done", "state": "released", "after_s": 0.5,
        "seconds": 0.25, "measured_by": "engine", "bytes": 4096, "layers": 2, "tokens": 8, "cached": 0,
        "overlap_s": 0.1,
    }  # fmt: skip
    return {"kind": "transfer", "reason": reason, "subject": "x", "at": after, "figures": told | figures}


def test_a_transfer_is_stored_with_its_request():
    record = factories.record(decisions=[{"kind": "slo", "reason": "class", "at": 0.0, "figures": {}}, step()])
    factories.records_stored(record)
    row = KvTransfer.objects.get()
    assert (row.request, row.source, row.target, row.model) == (record.id, "p", "d", record.model)
    assert (row.outcome, row.state, row.reason, row.error) == ("done", "released", "kv_landed", "")
    assert (row.bytes, row.layers, row.tokens, row.cached, row.overlap_s) == (4096, 2, 8, 0, 0.1)
    assert row.started_at == datetime.fromtimestamp(record.arrived_at + 1.5, UTC)
    assert (row.bytes_s, row.held_s, row.flow) == (4096 / 0.25, 0.0, "")


@pytest.mark.parametrize(("held_s", "stored"), [(0.05, 0.05), (9.0, 0.25), (-1.0, 0.0), ("long", 0.0)])
def test_the_time_for_which_it_was_held_is_no_part_of_its_speed(held_s, stored):
    factories.records_stored(factories.record(decisions=[step(held_s=held_s, flow="scheduled")]))
    row = KvTransfer.objects.get()
    assert (row.held_s, row.flow) == (stored, "scheduled")
    assert row.bytes_s == (pytest.approx(4096 / (0.25 - stored)) if stored < 0.25 else None)


def test_a_batch_sent_again_stores_no_transfer_twice():
    record = factories.record(decisions=[step()])
    assert [factories.records_stored(record, record), factories.records_stored(record)] == [1, 0]
    assert KvTransfer.objects.count() == 1


def test_each_attempt_is_a_row_and_an_unmeasured_one_says_so():
    unmeasured = {"outcome": "undone", "state": "moving", "measured_by": "gateway", "undo": "moving_timeout"}
    lost = step("moving_timeout", 1.0, **unmeasured)
    for name in ("bytes", "layers", "tokens", "cached", "overlap_s"):
        del lost["figures"][name]
    record = factories.record(decisions=[lost, step(attempt=2)])
    factories.records_stored(record)
    first, second = sorted(kv_transfers(request=record.id), key=lambda row: row.attempt)
    assert (first.outcome, first.reason, first.bytes, first.bytes_s) == ("undone", "moving_timeout", None, None)
    assert (second.attempt, second.outcome) == (2, "done")


@pytest.mark.parametrize(
    "figures",
    [{"outcome": "strange"}, {"state": None}, {"outcome": 3}],
)
def test_a_step_that_is_no_transfer_stores_nothing(figures):
    assert (
        factories.records_stored(factories.record(decisions=[step(**figures), {"kind": "transfer", "reason": "x"}]))
        == 1
    )
    assert KvTransfer.objects.count() == 0


def test_odd_figures_cost_no_batch():
    odd = step(seconds=float("nan"), bytes=float("inf"), attempt=10**9, error="a\x00\ud800b", source="s" * 500)
    assert factories.records_stored(factories.record(decisions=[odd])) == 1
    row = KvTransfer.objects.get()
    assert (row.seconds, row.bytes, row.attempt, row.error, len(row.source)) == (0.0, None, 32_767, "a?b", 64)


@pytest.mark.parametrize("sign", [1, -1])
def test_counts_that_no_column_holds_cost_no_batch(sign):
    odd = step(
        bytes=sign * 2**63, layers=sign * 10**12, tokens=sign * 10**12, cached=sign * 2**31, attempt=sign * 2**31
    )
    assert factories.records_stored(factories.record(decisions=[odd])) == 1
    row = KvTransfer.objects.get()
    expected = (2**63 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 32_767) if sign > 0 else (0, 0, 0, 0, 1)
    assert (row.bytes, row.layers, row.tokens, row.cached, row.attempt) == expected


def test_a_transfer_is_found_by_its_id_without_reading_whole_partitions():
    factories.records_stored(factories.record(decisions=[step()]))
    row = KvTransfer.objects.get()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    plan = kv_transfers().filter(pk=row.pk).order_by().explain()
    assert f"kv_transfer_{row.started_at:%Y%m%d}_id_idx" in plan


def test_transfers_are_found_by_either_end_and_newest_first():
    factories.records_stored(
        factories.record(arrived_at=START.timestamp(), decisions=[step()]),
        factories.record(arrived_at=at(60).timestamp(), decisions=[step("cut", instance="e", outcome="failed")]),
        factories.record(arrived_at=at(90).timestamp(), decisions=[step(source="q", instance="p")]),
    )
    assert [row.target for row in kv_transfers(instance="p")] == ["p", "e", "d"]
    assert [row.target for row in kv_transfers(source="p", outcome="done")] == ["d"]
    assert [row.source for row in kv_transfers(since=at(70))] == ["q"]


def test_a_day_without_a_partition_gets_one_and_old_ones_go():
    factories.records_stored(
        factories.record(arrived_at=datetime(2021, 5, 5, 23, 59, 59, tzinfo=UTC).timestamp(), decisions=[step()])
    )
    assert date(2021, 5, 6) in partitions(TRANSFERS), "it began after midnight"
    partitions_make(days=[date(2021, 5, 20)])
    dropped = records_retain(days=3, today=date(2021, 5, 10))
    assert {date(2021, 5, 5), date(2021, 5, 6)} <= set(dropped)
    assert date(2021, 5, 20) in partitions(TRANSFERS)
    assert KvTransfer.objects.count() == 0
