"""What a job waits for, where its labels are conditions as Ray reads them."""

import pytest

from workers.ray.jobs import HostSeen
from workers.ray.wants import why_pending

NONE_HAS = "the cluster has none"


def told(wanted, *labels):
    hosts = [HostSeen(f"10.0.0.{number}", "alive", {"GPU": (0.0, 1.0)}, each) for number, each in enumerate(labels)]
    return why_pending("", {"resources": {"GPU": 1}, "labels": {"zone": wanted}}, hosts)


@pytest.mark.parametrize("wanted", ["a", "in(a)", "in(b, a)", "in(b,a)", "!b", "!in(b, c)"])
def test_a_node_that_fits_is_waited_for_because_it_is_full(wanted):
    assert (
        told(wanted, {"zone": "b"}, {"zone": "a"})
        == "waits for 1 GPU on one node: the most that is free on one is 0 GPU"
    )


@pytest.mark.parametrize("wanted", ["b", "in(b, c)", "!a", "!in(a, b)"])
def test_labels_that_no_node_has_are_named(wanted):
    assert told(wanted, {"zone": "a"}) == f"waits for a node with the labels zone={wanted}: {NONE_HAS}"


def test_a_node_without_the_label_fits_only_what_it_must_not_be():
    assert NONE_HAS in told("a", {})
    assert NONE_HAS in told("in(a)", {})
    assert NONE_HAS not in told("!a", {})
    assert NONE_HAS not in told("!in(a, b)", {})
