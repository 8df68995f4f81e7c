"""What gateways publish, merged into one look."""

import math

import pytest

from controller.scale.observation import InstanceRow, observe, outstanding

NOW = 1_700_000_000.0
QUIET = {
    "arrival_rate": 0.0, "service_rate": 0.0, "queued": 0, "wait_over_slo": 0.0,
    "migrating": 0, "migrate_wait_over_slo": 0.0,
}  # fmt: skip


def instance(id, utilisation=0.5, running=2, waiting=1):
    return {"id": id, "utilisation": utilisation, "running": running, "waiting": waiting}


def message(*instances, at=NOW - 0.5, **other):
    more = {"capacity": other.pop("capacity")} if "capacity" in other else {}
    models = other.pop("models", {"m": {**QUIET, **other}})
    return {"at": at, "period_s": 1.0, "instances": list(instances), "models": models, **more}


def look_at(rows, messages):
    return observe(rows, messages, NOW, "m")


READY = InstanceRow("a", "running", "ready", False)


def test_states_come_from_the_database():
    draining, stopped, lost = (
        InstanceRow("c", "draining", "ready", False),
        InstanceRow("d", "stopped", "ready", True),
        "unreachable",
    )
    rows = [
        READY,
        InstanceRow("b", "running", "pending", False),
        draining,
        stopped,
        InstanceRow("e", "running", lost, True),
    ]
    look = look_at(rows, [message(instance("a"))])
    assert [(m.id, m.state) for m in look.members] == [("a", "ready"), ("b", "starting"), ("c", "draining")]


def test_two_gateways_add_up():
    first = message(instance("a", 0.4, 2, 0), arrival_rate=3.0, service_rate=1.0, queued=2, wait_over_slo=0.3)
    second = message(instance("a", 0.7, 1, 1), arrival_rate=2.0, service_rate=3.0, queued=1, wait_over_slo=0.9)
    look = look_at([READY], [first, second])
    assert (look.arrival_rate, look.queued, look.wait_over_slo, look.mean_utilisation) == (5.0, 3, 0.9, 0.7)
    assert look.processing_rate == pytest.approx(4.0 / 0.7)
    assert outstanding([first, second]) == {"a": 4}


def test_an_instance_is_needed_that_one_gateway_needs():
    messages = [message({**instance("a", 0.9), "needed": False}), message({**instance("a", 0.1), "needed": True})]
    assert [member.needed for member in look_at([READY], messages).members] == [True]
    assert [member.needed for member in look_at([READY], [message(instance("a"))]).members] == [False]


def test_a_dead_gateway_beside_a_live_one_does_not_count():
    look = look_at([READY], [message(instance("a", 0.9), at=NOW - 60, queued=50), message(instance("a", 0.2))])
    assert (look.queued, look.mean_utilisation, look.stale) == (0, 0.2, False)


def test_old_messages_alone_are_stale_with_their_age():
    look = look_at([READY], [message(at=NOW - 60)])
    assert look.stale
    assert look.age_s == pytest.approx(60)


def test_no_message_at_all_is_stale():
    assert look_at([READY], []).stale


def test_another_models_traffic_is_not_this_ones():
    """Two models behind one gateway: a rush for the one must not add instances of the other."""
    rush = {"arrival_rate": 50.0, "service_rate": 5.0, "queued": 400, "wait_over_slo": 9.0}
    messages = [message(instance("a", 0.2), models={"m": QUIET, "other": rush})]
    look = look_at([READY], messages)
    assert (look.arrival_rate, look.queued, look.wait_over_slo, look.processing_rate) == (0.0, 0, 0.0, None)
    assert look.load == pytest.approx(0.2)
    assert observe([READY], messages, NOW, "other").load == pytest.approx(9.0)


def test_a_model_no_one_asked_for_has_no_traffic():
    look = observe([READY], [message(instance("a", 0.1))], NOW, "unheard")
    assert (look.arrival_rate, look.load) == (0.0, pytest.approx(0.1))


DRAINING, STARTING = InstanceRow("d", "draining", "ready", False), InstanceRow("s", "running", "pending", False)
LOST_ONE = InstanceRow("e", "running", "unreachable", True)


@pytest.mark.parametrize("rows", [[], [DRAINING], [LOST_ONE]])
def test_arrivals_with_no_one_there_and_no_one_coming_are_overload(rows):
    """H11. A gateway refuses them at once: nothing waits, and nothing is finished."""
    look = look_at(rows, [message(arrival_rate=0.1)])
    assert (look.queued, look.processing_rate, look.load) == (0, 0.0, math.inf)
    assert look_at(rows, [message()]).load == 0.0, "nobody asks"


def test_what_was_finished_by_an_instance_that_has_gone_is_no_rate_to_come():
    assert look_at([], [message(arrival_rate=2.0, service_rate=2.0)]).load == math.inf


def test_an_instance_on_its_way_is_waited_for():
    assert look_at([STARTING], [message(arrival_rate=2.0)]).load == 0.0


@pytest.mark.parametrize(
    ("capacity", "load"), [("up", 0.0), ("undecoded", 0.0), ("coming", math.inf), ("none", math.inf)]
)
def test_what_instances_of_another_role_serve_asks_for_none_of_this(capacity, load):
    look = observe([], [message(arrival_rate=2.0, capacity={"m": capacity, "n": "up"})], NOW, "m", role="prefill")
    assert look.load == load


def test_what_waits_before_a_decode_instance_are_prefilled_requests():
    """A rush at prefill must not add decode instances, and a rush at decode no prefill instances."""
    prefill_rush = message(instance("a", 0.2), queued=40, wait_over_slo=3.0)
    decode_rush = message(instance("a", 0.2), migrating=7, migrate_wait_over_slo=2.0)
    loads = {
        (name, role): observe([READY], [rush], NOW, "m", role=role).load
        for name, rush in (("prefill", prefill_rush), ("decode", decode_rush))
        for role in ("prefill", "decode")
    }
    assert loads["prefill", "prefill"] == pytest.approx(3.0)
    assert loads["prefill", "decode"] == pytest.approx(0.2)
    assert loads["decode", "decode"] == pytest.approx(2.0)
    assert loads["decode", "prefill"] == pytest.approx(0.2)
    assert observe([READY], [decode_rush], NOW, "m", role="decode").queued == 7


STAGES = {
    "prefill": {"arrival_rate": 9.0, "service_rate": 3.0, "queued": 40, "wait_over_slo": 0.5},
    "decode": {"arrival_rate": 3.0, "service_rate": 3.0, "queued": 1, "wait_over_slo": 0.1},
}


def test_a_stage_that_is_told_apart_has_demand_of_its_own():
    """Prefill does a third of what arrives. By the model's rates decode would be at three times what it can do too."""
    model = {"arrival_rate": 9.0, "service_rate": 3.0, "queued": 40, "migrating": 1}
    apart, mixed = (message(instance("a", 0.9), **model, **more) for more in ({"stages": STAGES}, {}))
    prefill, decode = (observe([READY], [apart], NOW, "m", role=role) for role in ("prefill", "decode"))
    assert (prefill.arrival_rate, prefill.queued, prefill.load) == (9.0, 40, pytest.approx(2.7))
    assert (decode.arrival_rate, decode.queued) == (3.0, 1)
    assert decode.load == pytest.approx(0.9)
    assert observe([READY], [mixed], NOW, "m", role="decode").load == pytest.approx(2.7)


def test_an_older_gateways_rates_add_up_with_those_by_stage():
    old = message(instance("a", 0.2), arrival_rate=2.0, service_rate=2.0, migrating=5)
    new = message(instance("a", 0.2), stages=STAGES)
    look = observe([READY], [old, new], NOW, "m", role="decode")
    assert (look.arrival_rate, look.queued) == (5.0, 6)


def test_collocated_instances_go_by_the_models_rates():
    look = observe([READY], [message(instance("a"), arrival_rate=5.0, queued=3, stages=STAGES)], NOW, "m")
    assert (look.arrival_rate, look.queued) == (5.0, 3)


def test_how_fast_an_instance_is_comes_from_its_gateway():
    assert [m.speed for m in look_at([READY], [message({**instance("a"), "speed": 2.5})]).members] == [2.5]
    assert [m.speed for m in look_at([READY], [message(instance("a"))]).members] == [0.0], "of an older release"


def test_the_gateway_that_has_counted_least_says_for_how_long():
    old, new = ({**message(instance("a")), "counted_s": seconds} for seconds in (900.0, 2.0))
    assert look_at([READY], [old, new]).counted_s == 2.0
    assert look_at([READY], [message(instance("a"))]).counted_s is None, "an older release"
