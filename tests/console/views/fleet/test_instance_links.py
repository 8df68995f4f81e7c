"""Links of an instance with state, bandwidth and errors; KV transfers over them; what the fleet page shows of it."""

from __future__ import annotations

import pytest
from django.urls import reverse
from django.utils import timezone

from controller.models import InstanceLink, KvTransfer
from tests import factories

MB = 1_000_000


@pytest.fixture
def pair(db):
    """A prefill and a decode instance, the link between them, and one that went wrong."""
    prefill = factories.instance(id="prefill-1", role="prefill")
    factories.instance(id="decode-1", model=prefill.model, role="decode")
    now = timezone.now()
    shared = {"model": "demo", "since": now, "created_at": now, "observed_at": now}
    InstanceLink.objects.create(
        source="prefill-1", target="decode-1", state="up", bandwidth_bytes_s=2.5e9, latency_s=0.0004,
        bytes=120 * MB, transfers=12, failures=1, last_error="<b>connection reset</b>", error_at=now, **shared,
    )  # fmt: skip
    return prefill, shared


def transfer(**fields):
    defaults = {
        "started_at": timezone.now(), "request": "req-moved", "attempt": 1, "model": "demo", "source": "prefill-1",
        "target": "decode-1", "outcome": "done", "state": "released", "reason": "kv_landed", "bytes": 10 * MB,
        "layers": 32, "tokens": 500, "cached": 0, "seconds": 0.02, "overlap_s": 0.01, "measured_by": "engine",
    }  # fmt: skip
    return KvTransfer.objects.create(**{**defaults, **fields})


def page(client, name="decode-1"):
    answer = client.get(reverse("instance", args=[name]))
    return answer, answer.content.decode()


def test_an_instance_shows_its_links_with_what_moved_and_what_failed(viewer, live_store, pair):
    _, html = page(viewer)
    assert "2.5 GB/s" in html
    assert "120 MB" in html
    assert "&lt;b&gt;connection reset" in html
    assert "No KV transfers yet" in html


def test_transfers_lead_to_their_request_and_say_how_far_a_failed_one_came(viewer, live_store, pair):
    transfer()
    transfer(request="req-lost", attempt=2, outcome="failed", state="moving", reason="link_down", error="reset by peer")
    answer, html = page(viewer)
    assert [each["received"] for each in answer.context["transfers"]] == [True, True]
    assert "500 MB/s" in html
    assert reverse("request", args=["req-lost"]) in html
    assert "the link between the two instances was down, last state: moving" in html
    assert "attempt 2" in html
    answer, _ = page(viewer, "prefill-1")
    assert [(each["received"], each["other"]) for each in answer.context["transfers"]] == [(False, "decode-1")] * 2


def test_a_transfer_that_was_held_says_so_and_its_rate_is_that_of_the_link(viewer, live_store, pair):
    transfer(seconds=1.02, held_s=1.0, flow="scheduled")
    _, html = page(viewer)
    assert "held for 1.00 s" in html
    assert "500 MB/s" in html


def test_an_instance_alone_shows_neither(viewer, live_store, db):
    factories.instance(id="alone")
    assert "Links and KV transfers" not in page(viewer, "alone")[1]


def test_it_costs_no_more_queries_than_a_page_may(viewer, live_store, pair, django_assert_max_num_queries):
    transfer()
    with django_assert_max_num_queries(12):
        _, html = page(viewer)
    assert "Links and KV transfers" in html


def test_the_fleet_counts_links_and_lists_those_that_are_not_up(
    viewer, live_store, pair, django_assert_max_num_queries
):
    _, shared = pair
    html = viewer.get(reverse("fleet")).content.decode()
    assert "1 up, 0 degraded, 0 down" in html
    assert "All links are up" in html
    InstanceLink.objects.create(source="decode-1", target="prefill-1", state="down", last_error="no answer", **shared)
    with django_assert_max_num_queries(12):
        html = viewer.get(reverse("fleet")).content.decode()
    assert "1 up, 0 degraded, 1 down" in html
    assert "no answer" in html
