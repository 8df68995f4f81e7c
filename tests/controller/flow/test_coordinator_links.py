"""The coordinator of pruning where the link of an instance that only prefills is what holds requests up."""

import pytest

from controller.core.pruning import (
    KvPort,
    ModelQueue,
    OpenKv,
    OutgoingKv,
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
from controller.flow import coordinator
from controller.flow.coordinator import Coordinator, CoordinatorConfig

NOW = 100.0
S_A_TOKEN = 0.001  # of the port, for one gateway alone


def outgoing(name, due_s, tokens, **changes):
    return OutgoingKv(name, NOW + due_s, tokens, **changes)


def waiting(name, due_s, tokens):
    """Its prompt takes no time worth counting."""
    return WaitingPrefill(name, NOW + due_s, 1e-6, tokens, 0.0)


def report(*kv, rows=(), s_a_token=S_A_TOKEN, move_s=0.0, gateway="a", unit="p", model="m"):
    made = PrefillUnit(unit, 1.0, 0.0, port=KvPort(s_a_token, move_s, list(kv)))
    return QueueReport(gateway, NOW, [ModelQueue(model, list(rows), [made])])


def decided(*reports, left=None, budget=1.0, host="host"):
    """`left`: of KV of which part has gone. One daemon speaks of all KV."""
    kv = [row.id for each in reports for queue in each.queues for unit in queue.units for row in unit.port.outgoing]
    sent = {name: OpenKv(host, (left or {}).get(name, 1.0)) for name in kv}
    return Coordinator(CoordinatorConfig(budget)).decide(reports, NOW, sent).scavengers


SHORT, LONG, LAST = outgoing("short", 1.0, 500), outgoing("long", 2.0, 2000), outgoing("last", 2.5, 500)


def test_of_kv_that_has_to_leave_the_heaviest_goes_last_so_that_the_others_are_in_time():
    """3 s of the port until 2.5 s, at one gateway alone: no dispatcher counts links."""
    assert decided(report(SHORT, LONG, LAST)) == {"long": PruneReason("p", NOW + 3.0, NOW + 2.5)}


def test_without_daemons_that_order_transfers_links_are_not_counted():
    found = Coordinator(CoordinatorConfig(1.0)).decide([report(SHORT, LONG, LAST)], NOW)
    assert (found.scavengers, found.waiting, found.order) == ({}, 0, ())


def test_what_is_not_pruned_is_ordered_by_its_deadline(monkeypatch):
    """Also what no daemon speaks of yet, as a request whose prefix is fetched."""
    reports = [report(LAST, LONG), report(SHORT, gateway="b", unit="q")]
    sent = {"last": OpenKv("host", 1.0), "long": OpenKv("host", 1.0)}
    made = Coordinator(CoordinatorConfig(1.0))
    assert made.decide(reports, NOW, sent).order == ["short", "long", "last"]
    late = [report(SHORT, LONG, LAST)]
    sent["short"] = OpenKv("host", 1.0)
    assert made.decide(late, NOW, sent).order == ["short", "last"], "without what is pruned"
    monkeypatch.setattr(coordinator, "MOST_ORDERED", 1)
    assert made.decide(late, NOW, sent).order == ["short"]


def test_kv_that_has_gone_for_the_most_part_is_not_counted_whole():
    assert decided(report(SHORT, LONG, LAST), left={"long": 0.7}) == {}
    assert decided(report(SHORT, LONG, LAST), left={"long": 0.8}).keys() == {"long"}


def test_what_two_gateways_get_of_a_port_adds_up_to_its_rate():
    """Each gets half of it while both send, so that its transfers seem to need twice the time."""
    one = report(SHORT, LAST, s_a_token=2 * S_A_TOKEN)
    two = report(LONG, s_a_token=2 * S_A_TOKEN, gateway="b")
    assert decided(one, two) == {"long": PruneReason("p", NOW + 3.0, NOW + 2.5)}
    lighter = report(outgoing("long", 2.0, 1500), s_a_token=2 * S_A_TOKEN, gateway="b")
    assert decided(one, lighter) == {}


def test_a_port_that_takes_next_to_no_time_holds_nobody_up():
    """Whoever has taken a gateway reports what it likes: 0 is what two such ports are worth."""
    assert decided(report(SHORT, s_a_token=5e-324), report(LAST, s_a_token=5e-324, gateway="b")) == {}


def test_instances_whose_kv_one_daemon_sends_share_its_port():
    """Also those of another model."""
    one = report(SHORT, LAST, s_a_token=2 * S_A_TOKEN)
    two = report(LONG, s_a_token=2 * S_A_TOKEN, gateway="b", unit="q", model="n")
    assert decided(one, two) == {"long": PruneReason("q", NOW + 3.0, NOW + 2.5)}
    apart = {"short": OpenKv("here", 1.0), "last": OpenKv("here", 1.0), "long": OpenKv("there", 1.0)}
    assert not Coordinator(CoordinatorConfig(1.0)).decide([one, two], NOW, apart).scavengers


def many_to_one(inbound, *, rows=(), size_bytes=0.0, receives=0.0):
    """Two hosts that send to one: each has half a second of its own port to send, and both together 3.2 s of a
    receiving port of half the rate, within 2.5 s."""
    short, last = outgoing("short", 1.0, 400, target="d"), outgoing("last", 2.5, 400, target="d")
    long = outgoing("long", 2.0, 800, target="d")
    one, two = report(short, last, rows=rows), report(long, gateway="b", unit="q")
    for each in (one, two):
        each.queues[0] = each.queues[0]._replace(inbound=inbound)
    sent = {"short": OpenKv("one", 1.0, "three"), "last": OpenKv("one", 1.0, "three")}
    sent["long"] = OpenKv("two", 1.0, "three")
    sent = {name: each._replace(size_bytes=size_bytes, receives=receives) for name, each in sent.items()}
    return Coordinator(CoordinatorConfig(1.0)).decide([one, two], NOW, sent).scavengers


def test_a_receiver_of_half_the_bandwidth_is_the_bottleneck_of_two_senders():
    assert many_to_one({}) == many_to_one({"d": 0.0}) == {}, "its port was not measured"
    assert many_to_one({"d": 2 * S_A_TOKEN}) == {}, "each gateway gets as much of it, while the other one does"
    assert many_to_one({"d": 4 * S_A_TOKEN}) == {"long": PruneReason("q", NOW + 3.2, NOW + 2.5)}


def test_until_transfers_showed_it_the_bandwidth_that_the_receivers_daemon_was_told_counts():
    """Of the KV that is open, the most bytes for a token are 8,000 / 400."""
    late = {"long": PruneReason("q", NOW + 3.2, NOW + 2.5)}
    assert many_to_one({"d": 0.0}, size_bytes=8000.0, receives=10_000.0) == late
    assert many_to_one({"d": 0.0}, size_bytes=8000.0, receives=20_000.0) == {}
    assert many_to_one({"d": 0.0}, size_bytes=0.0, receives=10_000.0) == {}, "nobody knows how many bytes a token has"
    assert many_to_one({"d": 2 * S_A_TOKEN}, size_bytes=8000.0, receives=10_000.0) == {}, "transfers showed more"


def test_what_is_not_placed_yet_loads_each_receiver_with_its_part():
    """Of two receiving hosts, one has all of the KV that is placed: with 200 tokens more it is late."""
    inbound = {"d": 3 * S_A_TOKEN, "e": 3 * S_A_TOKEN}
    assert many_to_one(inbound, rows=[waiting("w", 2.4, 100)]) == {}
    assert many_to_one(inbound, rows=[waiting("w", 2.4, 300)]).keys() == {"long"}


def test_a_host_of_which_the_port_of_another_models_instance_was_not_measured_is_left_out():
    """It would have the rate of one instance's part, and the load of both."""
    one = report(outgoing("short", 1.0, 400, target="d"), outgoing("last", 2.5, 400, target="d"))
    two = report(outgoing("long", 2.0, 800, target="e"), gateway="b", unit="q", model="n")
    one.queues[0] = one.queues[0]._replace(inbound={"d": 2 * S_A_TOKEN})
    sent = {"short": OpenKv("one", 1.0, "three"), "last": OpenKv("one", 1.0, "three")}
    sent["long"] = OpenKv("two", 1.0, "three")
    assert not Coordinator(CoordinatorConfig(1.0)).decide([one, two], NOW, sent).scavengers


def test_of_receiving_hosts_only_the_busiest_of_a_model_is_looked_at(monkeypatch):
    """What waits goes to any of them, so with each of them a decision took time for requests times hosts."""
    looked_at = []
    through = coordinator._through
    monkeypatch.setattr(coordinator, "_through", lambda *given: looked_at.append(given) or through(*given))
    kv = [outgoing(f"kv{host}", 2.0, 10 + host, target=f"d{host}") for host in range(9)]
    found = report(*kv, outgoing("long", 2.0, 900, target="d4"), rows=[waiting("w", 2.0, 90)])
    inbound = {f"d{host}": 3 * S_A_TOKEN for host in range(9)}
    found.queues[0] = found.queues[0]._replace(inbound=inbound)
    sent = {row.id: OpenKv("one", 1.0, f"host{row.target}") for row in found.queues[0].units[0].port.outgoing}
    assert Coordinator(CoordinatorConfig(1.0)).decide([found], NOW, sent).scavengers.keys() == {"long"}
    assert len(looked_at) == 2, "the port through which it leaves, and one through which it comes"


def test_an_instance_is_on_the_host_to_which_most_of_its_kv_goes():
    """A request that was placed again has KV on the way to its old host too."""
    short, last = outgoing("short", 1.0, 400, target="d"), outgoing("last", 2.5, 400, target="d")
    found = report(short, last, outgoing("long", 2.0, 800, target="d"), s_a_token=S_A_TOKEN / 10)
    found.queues[0] = found.queues[0]._replace(inbound={"d": 2 * S_A_TOKEN, "e": 2 * S_A_TOKEN})
    sent = {"short": OpenKv("one", 1.0, "two"), "last": OpenKv("one", 1.0, "two"), "long": OpenKv("one", 1.0, "old")}
    assert Coordinator(CoordinatorConfig(1.0)).decide([found], NOW, sent).scavengers.keys() == {"long"}


def test_kv_that_is_pruned_for_one_port_does_not_load_the_others():
    """The port with the most seconds goes first, and what it prunes counts in the budget of the others."""
    sent = {name: OpenKv("one", 1.0, "two") for name in ("short", "long", "last")}
    kv = [row._replace(target="d") for row in (SHORT, LONG, LAST)]
    found = report(*kv)
    found.queues[0] = found.queues[0]._replace(inbound={"d": 1.1 * S_A_TOKEN})
    scavengers = Coordinator(CoordinatorConfig(1.0)).decide([found], NOW, sent).scavengers
    assert scavengers == {"long": ("p", pytest.approx(NOW + 3.3), NOW + 2.5)}


def test_a_host_without_a_daemon_is_left_out_though_others_have_one():
    """Nobody could send its KV last, or says how much of it has gone."""
    elsewhere = {"another": OpenKv("host", 1.0)}
    assert not Coordinator(CoordinatorConfig(1.0)).decide([report(SHORT, LONG, LAST)], NOW, elsewhere).scavengers


def test_a_prompt_that_waits_has_until_its_prefill_is_due_and_the_time_of_its_move():
    rows = [waiting("waits", 1.0, 500)]
    assert decided(report(outgoing("kv", 1.0, 600), rows=rows, move_s=0.1)) == {}
    assert decided(report(outgoing("kv", 1.0, 601), rows=rows, move_s=0.1)).keys() == {"kv"}


def test_a_request_that_an_operator_forced_is_never_pruned_and_one_of_much_value_last():
    forced = outgoing("long", 2.0, 2000, exempt=True)
    assert "long" not in decided(report(SHORT, forced, LAST))
    dear = outgoing("long", 2.0, 2000, value=10.0)
    assert decided(report(SHORT, dear)).keys() == {"short"}


def test_no_more_are_pruned_than_the_budget_allows():
    assert decided(report(SHORT, LONG, LAST), budget=0.3) == {}
    assert decided(report(SHORT, LONG, LAST), budget=0.34).keys() == {"long"}


def test_what_is_pruned_for_the_link_counts_in_the_budget_for_computing():
    """Both of the prompts that wait are too much for the link. Half of what waits may be pruned: no third one, though
    computing has no room for it either."""
    rows = [WaitingPrefill(name, NOW + 2.0, 0.9, 2048, 0.0) for name in ("w1", "w2", "w3", "w4")]
    kv = outgoing("kv", 5.0, 1, exempt=True)
    found = decided(report(kv, rows=rows[:2]), report(rows=rows[2:], gateway="b"), budget=0.5)
    assert len(found) == 2


def test_a_report_of_a_port_survives_json_and_older_releases_are_understood():
    sent = report(SHORT, LONG, rows=[waiting("waits", 1.0, 600)])
    assert report_from_json(report_to_json(sent)) == sent
    assert sent.waits
    received = report(SHORT._replace(target="d"))
    received.queues[0] = received.queues[0]._replace(inbound={"d": 0.001, "e": 0.0})
    assert report_from_json(report_to_json(received)) == received
    bare = QueueReport("a", NOW, [ModelQueue("m", [], [PrefillUnit("p", 1.0, 0.0)])])
    assert not bare.waits
    assert len(report_to_json(bare)[2][0][2][0]) == 5, "as a coordinator of an older release reads it"


def longer(value):
    """The same message as a later release may write it: each list of fields goes on with ones that are not known here.

    Lists of queues, rows, instances and outgoing KV are told from lists of fields by what is in them.
    """
    if not isinstance(value, list):
        return value
    inner = [longer(each) for each in value]
    return inner if value and all(isinstance(each, list) for each in value) else [*inner, "new", [1.0]]


def test_fields_of_a_later_release_are_left_out():
    """While a fleet is upgraded its coordinator may be older than its gateways."""
    sent = report(SHORT, LONG, rows=[waiting("waits", 1.0, 600)])
    sent.queues[0] = sent.queues[0]._replace(inbound={"d": 0.001})
    assert report_from_json(longer(report_to_json(sent))) == sent
    without_port = QueueReport("a", NOW, [ModelQueue("m", [waiting("waits", 1.0, 600)], [PrefillUnit("p", 1.0, 0.0)])])
    raw = report_to_json(without_port)
    raw[2][0][2][0] += [None, "new"]
    assert report_from_json(raw) == without_port
    orders = PruningOrders(3, NOW, NOW + 3, {"short": PruneReason("p", 1.0, 2.0)}, 1, 1, ["a"], ["last"])
    raw = {**orders_to_json(orders), "new": 1}
    raw["scavengers"]["short"].append("new")
    assert orders_from_json(raw) == orders


@pytest.mark.parametrize(
    "port",
    [
        [],
        [0.1, 0.0],
        [0.1, 0.0, [["a"]]],
        [-1.0, 0.0, []],
        ["x", 0.0, []],
        [0.1, 0.0, [["a", 1.0, -5, False, 1.0]]],
        [0.1, 0.0, [["a", 1.0, 5, 0, 1.0]]],
    ],
)
def test_a_port_that_cannot_be_is_refused(port):
    with pytest.raises((TypeError, ValueError)):
        report_from_json(["a", NOW, [["m", [], [["p", 1.0, 0.0, 0.0, 0, port]]]]])


def test_a_port_without_a_rate_is_none():
    read = report_from_json(["a", NOW, [["m", [], [["p", 1.0, 0.0, 0.0, 0, [0, 0.0, []]]]]]])
    assert read.queues[0].units[0].port is None
