"""Links in the migrator: avoided when down, closed after failures in a row, counted where a placement asks."""

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.kv_links import KvMoved, LinkState
from controller.core.pruning import KvPort, OutgoingKv
from controller.core.types import Role
from controller.dispatch import build_dispatcher, build_migrator
from controller.dispatch.disaggregation.link_book import LinkBook, Trial, _common, _without
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import commit, done, of, places, sent, up
from tests.controller.dispatch.fleet import request

MOVED = KvMoved(bytes=100_000, tokens=100, seconds=0.01)  # 1,000 bytes a token


def fleet(*prefill, decoders=2, **overrides):
    made = build_migrator("slackline", overrides)
    made.handle([up(f"d{i}") for i in range(decoders)] + [up(name, Role.PREFILL) for name in ("p", *prefill)], 0.0)
    return made


def seen(source, target, state=LinkState.DOWN, bandwidth=None, latency=None):
    return ev.LinkSeen(source, target, state, bandwidth, latency)


def on_its_way(now):
    return Trial.ON_ITS_WAY


# ---- the book -------------------------------------------------------------------------------------------------------


def test_a_link_no_one_spoke_of_is_usable_and_unmeasured():
    book = LinkBook(3, 2.0)
    assert book.usable(("p", "d"), 0.0)
    assert book.move_s(("p", "d"), 100) is None


def test_the_time_in_which_a_transfer_was_held_does_not_make_its_link_slow():
    book, pair = LinkBook(3, 2.0), ("p", "d")
    book.moved(pair, MOVED._replace(seconds=5.01, held_s=5.0, flow="scheduled"), 1.0)
    assert book.move_s(pair, 100) == pytest.approx(0.01)


def test_failures_in_a_row_close_a_link_each_time_for_twice_as_long():
    book, pair = LinkBook(2, 2.0), ("p", "d")
    book.failed(pair, "a", 0.0)
    assert book.usable(pair, 0.0)
    book.failed(pair, "b", 1.0)
    assert (book.usable(pair, 2.9), book.usable(pair, 3.0)) == (False, True)
    book.placed(pair, "c", on_its_way, 3.0)
    book.failed(pair, "c", 3.0)
    assert (book.usable(pair, 6.9), book.usable(pair, 7.0)) == (False, True)
    book.moved(pair, None, 1.0)
    book.failed(pair, "d", 8.0)
    assert book.usable(pair, 8.0), "one that arrived makes it as good as new"


def test_no_link_stays_closed_for_more_than_half_a_minute():
    book, pair = LinkBook(1, 2.0), ("p", "d")
    for turn in range(8):
        book.placed(pair, turn, on_its_way, 100.0 * turn)
        book.failed(pair, turn, 100.0 * turn)
    assert (book.usable(pair, 729.9), book.usable(pair, 730.0)) == (False, True)


def test_many_that_fail_at_once_close_it_no_longer_than_the_first_few():
    book, pair = LinkBook(3, 2.0), ("p", "d")
    for name in range(8):
        book.failed(pair, name, 1.0)
    assert (book.usable(pair, 2.9), book.usable(pair, 3.0)) == (False, True)
    book.failed(pair, "heard of later", 2.9)
    book.failed(pair, "and after that", 5.0)
    assert book.usable(pair, 5.0), "both were sent before"


def test_one_that_was_sent_before_neither_ends_nor_fails_the_trial():
    book, pair = LinkBook(1, 2.0), ("p", "d")
    book.failed(pair, "first", 0.0)
    book.placed(pair, "trial", on_its_way, 2.0)
    book.failed(pair, "straggler", 2.1)
    assert book.tried(pair, 2.0, 2.2), "by the same one, and closed to others for no other reason"
    book.failed(pair, "trial", 2.5)
    assert not book.tried(pair, 2.0, 2.5)
    assert (book.usable(pair, 6.4), book.usable(pair, 6.5)) == (False, True)


def test_a_trial_that_arrives_opens_it_whatever_failed_beside_it():
    book, pair = LinkBook(2, 2.0), ("p", "d")
    for name in ("first", "second"):
        book.failed(pair, name, 0.0)
    book.placed(pair, "trial", on_its_way, 2.0)
    book.failed(pair, "straggler", 2.1)
    book.moved(pair, None, 1.0)
    book.failed(pair, "another", 2.2)
    assert book.usable(pair, 2.2), "failures in a row are counted from zero"


def test_what_its_engine_says_and_what_transfers_say_both_count():
    book, pair = LinkBook(1, 2.0), ("p", "d")
    book.seen(pair, LinkState.UP, 1e6, 0.0)
    book.failed(pair, "a", 0.0)
    assert not book.usable(pair, 0.1), "it answers, and loses what is sent over it"
    book.moved(pair, None, 1.0)
    book.seen(pair, LinkState.DOWN, None, None)
    assert not book.usable(pair, 0.2)
    (view,) = book.views(0.2)
    assert (view.state, view.closed, view.bandwidth_bytes_s) == (LinkState.DOWN, False, 1e6)


def test_time_of_a_move_from_bandwidth_else_from_transfers():
    book = LinkBook(3, 2.0)
    book.moved(("p", "d"), MOVED, 1.0)
    assert book.move_s(("p", "d"), 200) == pytest.approx(0.02), "as the last one went"
    book.seen(("p", "d"), LinkState.UP, 1e6, 0.005)
    assert book.move_s(("p", "d"), 200) == pytest.approx(0.205), "200,000 bytes at a million a second"
    book.seen(("p", "e"), LinkState.UP, 2e6, 0.0)
    assert book.move_s(("p", "e"), 200) == pytest.approx(0.1), "the model's KV is as large on another link"


def test_an_instance_that_comes_back_starts_over():
    book = LinkBook(1, 2.0)
    book.failed(("p", "d"), "a", 0.0)
    book.forget("d", {"p"})
    assert book.usable(("p", "d"), 0.1)


@pytest.mark.parametrize("name", ["link_failures", "link_closed_s", "link_patience_s"])
def test_wrong_settings_are_named(name):
    with pytest.raises(ConfigError) as raised:
        build_dispatcher("slackline", {"migrator": {name: 0}})
    assert raised.value.field == name


# ---- the migrator ---------------------------------------------------------------------------------------------------


def test_a_link_that_is_down_is_avoided_and_used_again_when_it_is_back():
    made = fleet()
    assert places(made.handle([seen("p", "d0"), done("a"), done("b")], 0.0)) == [("a", "d1"), ("b", "d1")]
    made.handle([ev.TransferDone(name, "d1") for name in "ab"] + [ev.Finished(name, 10) for name in "ab"], 0.5)
    back = made.handle([seen("p", "d0", LinkState.UP), done("c", 1.0)], 1.0)
    assert places(back) == [("c", "d0")]


@pytest.mark.parametrize(
    ("reason", "usable", "incompatible"),
    [
        ("cut", False, False),
        ("timeout", False, False),
        ("other_model", True, True),
        ("refused", True, False),
        ("kv_lost", True, False),
    ],
)
def test_kv_that_its_decode_instance_computed_is_a_failure_of_the_link_or_of_the_pair(reason, usable, incompatible):
    """The answer goes on, so its load stays counted there, and the copy at the prefill instance is freed."""
    made = fleet(decoders=1, migrator={"link_failures": 1})
    assert places(made.handle([done("a")], 0.0)) == [("a", "d0")]
    lost = KvMoved(seconds=0.1, reason=reason)
    reply = made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", lost)], 0.1)
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    assert (made.state_of("a"), made.fleet(0.1)[0].running) == (State.COMMITTED, 1)
    assert (made.links.usable(("p", "d0"), 0.1), bool(made._incompatible)) == (usable, incompatible)


@pytest.mark.parametrize(("reason", "usable", "move_s"), [("", True, pytest.approx(0.01)), ("cut", False, None)])
def test_a_transfer_that_is_measured_only_with_its_whole_answer_tells_of_its_link(reason, usable, move_s):
    made, pair = fleet(decoders=1, migrator={"link_failures": 1}), ("p", "d0")
    made.handle([done("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", assumed=True)], 0.1)
    moved = KvMoved(seconds=0.01, reason=reason) if reason else MOVED
    told = made.handle([ev.TransferDone("a", "d0", moved, released=not reason)], 0.5)
    assert of(told, ev.FreeKv) == ([ev.FreeKv("a", "p")] if reason else [])
    assert of(made.handle([ev.Finished("a", 10)], 0.5), ev.FreeKv) == []
    assert (made.links.usable(pair, 0.5), made.links.move_s(pair, 100)) == (usable, move_s)


def test_a_degraded_link_is_no_reason_to_go_elsewhere():
    made = fleet()
    assert places(made.handle([seen("p", "d0", LinkState.DEGRADED), done("a")], 0.0)) == [("a", "d0")]


def test_with_every_link_down_it_is_prefilled_again_where_one_is_not():
    made = fleet("q")
    reply = made.handle([seen("p", "d0"), seen("p", "d1"), done("a")], 0.0)
    (again,) = of(reply, ev.PrefillAgain)
    assert (again.request.id, again.avoid, again.decision.reason) == ("a", {"p"}, "links_down")
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    assert made.state_of("a") is None


def test_it_waits_for_room_at_a_full_instance_rather_than_to_be_prefilled_again():
    """Only d1 has room and its link is down; d0 is full and its link is up. Prefilled elsewhere it would find no more
    room, and after three prefills it was lost."""
    made = build_migrator("slackline", {})
    made.handle([up("d0", kv_capacity_tokens=190), up("d1"), up("p", Role.PREFILL), up("q", Role.PREFILL)], 0.0)
    assert places(made.handle([seen("p", "d1"), done("first")], 0.0)) == [("first", "d0")]
    reply = made.handle([done("second")], 0.0)
    assert (of(reply, ev.PrefillAgain), made.state_of("second")) == ([], State.WAITING)
    assert places(made.handle([ev.Finished("first", 10)], 1.0)) == [("second", "d0")]


def test_a_collocated_instance_needs_no_link():
    made = fleet()
    made.handle([up("c", Role.COLLOCATED)], 0.0)
    reply = made.handle([seen("p", "d0"), seen("p", "d1"), done("a")], 0.0)
    assert [again.avoid for again in of(reply, ev.PrefillAgain)] == [{"p"}]


def test_nowhere_else_to_go_it_waits_for_the_link_and_then_tries_it():
    made = fleet("q")
    down = [seen(source, target) for source in "pq" for target in ("d0", "d1")]
    reply = made.handle([*down, done("a")], 0.0)
    assert (places(reply), of(reply, ev.PrefillAgain)) == ([], [])
    assert reply.wake_at is not None
    assert places(made.handle([ev.Woke()], 1.9)) == []
    assert places(made.handle([ev.Woke()], 2.0)) == [("a", "d0")]


def test_a_link_that_only_failed_lately_is_taken_where_there_is_no_other_way():
    """The pause after a failure is the request's own: 0.05 s, doubled each time."""
    made = fleet(decoders=1, migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferFailed("a", "d0", "transfer_failed")], 0.0)
    assert places(made.handle([ev.Woke()], 0.05)) == []
    assert places(made.handle([ev.Woke()], 0.1)) == [("a", "d0")]


def test_a_link_that_comes_back_is_taken_at_once():
    made = fleet()
    made.handle([seen("p", "d0"), seen("p", "d1"), done("a")], 0.0)
    assert places(made.handle([seen("p", "d1", LinkState.UP)], 0.5)) == [("a", "d1")]


def test_transfers_that_fail_in_a_row_close_their_link_for_everybody():
    made = fleet(migrator={"link_failures": 2})
    for name in ("a", "b"):
        ((_, target),) = places(made.handle([done(name, tpot=0.03)], 0.0))
        assert target == "d0"
        made.handle([ev.TransferStarted(name, "d0"), ev.TransferFailed(name, "d0", "transfer_failed")], 0.0)
        made.handle([ev.TransferDone(name, "d1"), ev.Finished(name, 10)], 0.1)
    assert places(made.handle([done("c", 0.2)], 0.2)) == [("c", "d1")]
    made.handle([ev.TransferDone("c", "d1"), ev.Finished("c", 10)], 0.3)
    assert places(made.handle([done("d", 2.5)], 2.5)) == [("d", "d0")], "the trial"


def test_transfers_cut_by_one_blip_close_their_link_for_as_long_as_one_would():
    made = fleet(decoders=1)
    names = [f"r{number}" for number in range(8)]
    made.handle([done(name) for name in names], 0.0)
    cut = [ev.TransferFailed(name, "d0", "cut") for name in names]
    made.handle([*(ev.TransferStarted(name, "d0") for name in names), *cut], 0.0)
    assert not made.links.usable(("p", "d0"), 1.9)
    assert made.links.usable(("p", "d0"), 2.0)


def test_an_overdue_transfer_says_why_it_is_rolled_back():
    made = fleet(decoders=1, migrator={"moving_timeout_s": 1.0})
    made.handle([done("a"), ev.TransferStarted("a", "d0")], 0.0)
    made.handle([ev.TransferStarted("a", "d0")], 0.0)
    assert of(made.handle([ev.Woke()], 1.0), ev.Abort) == [ev.Abort("a", "d0", "moving_timeout")]
    assert made.state_of("a") is State.WAITING


def test_what_is_prefilled_again_goes_elsewhere_if_it_can():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("p", Role.PREFILL), up("q", Role.PREFILL)], 0.0)
    for avoided, other in (("p", "q"), ("q", "p")):
        reply = dispatcher.handle([ev.Arrived(request(f"r-{avoided}"), frozenset({avoided}))], 0.0)
        assert [action.instance_id for action in of(reply, ev.Send)] == [other]


# ---- tpot_linked ----------------------------------------------------------------------------------------------------


def linked(**speeds):
    made = build_migrator("slackline", {"migration": {"name": "tpot_linked"}})
    made.handle([up("d0"), up("d1"), up("d2"), up("p", Role.PREFILL)], 0.0)
    made.handle([ev.PrefillDone(request("first", prompt=100), "p", 100)], 0.0)
    made.handle([ev.TransferStarted("first", "d0"), ev.TransferDone("first", "d0", MOVED)], 0.0)
    made.handle([ev.Finished("first", 10)], 0.0)
    made.handle([seen("p", name, LinkState.UP, speed, 0.0) for name, speed in speeds.items()], 0.0)
    return made


def test_the_instance_that_it_joins_the_soonest_is_asked_first():
    """1,000 tokens are a megabyte: 1 s to d0, 10 ms to d1, half a second to d2. An idle step takes 21 ms."""
    assert places(linked(d0=1e6, d1=1e8, d2=2e6).handle([done("a", prompt=1000, tpot=2.0)], 1.0)) == [("a", "d1")]


def test_equal_ways_decide_nothing():
    """Then the one placed at least recently is asked, as without links."""
    made = linked(d0=1e8, d1=1e8, d2=1e8)
    assert places(made.handle([done("a", prompt=1000)], 1.0)) == [("a", "d1")]


def test_the_time_on_the_way_counts_against_its_ttft():
    """Half a second on the way is more than its TTFT of 0.3 s; 10 ms and a decode step are not."""
    made = linked(d0=2e6, d1=2e6, d2=1e8)
    made.handle([done("busy", prompt=10, tpot=0.022, output=100)], 1.0)
    assert places(made.handle([done("a", 1.0, ttft=0.3, prompt=1000, tpot=0.03, output=10)], 1.0))[-1] == ("a", "d2")


def test_an_unmeasured_link_is_as_good_as_the_mean():
    """d0 takes 1 s, d1 10 ms; d2 nobody measured: 505 ms."""
    made = linked(d0=1e6, d1=1e8)
    made.handle([seen("p", "d1")], 1.0)
    assert places(made.handle([done("a", prompt=1000, tpot=2.0)], 1.0)) == [("a", "d2")]


def test_a_pair_whose_links_are_all_down_starts_over_in_the_moment_it_is_sent():
    made = fleet("q")
    sent = ev.PrefillSent(request("a"), "p", paired=True)
    (again,) = of(made.handle([seen("p", "d0"), seen("p", "d1"), sent], 0.0), ev.PrefillAgain)
    assert (again.request.id, again.avoid) == ("a", {"p"})
    assert made.state_of("a") is None


# ---- the port through which KV leaves ------------------------------------------------------------------------------


def test_transfers_at_the_same_time_show_the_rate_of_their_port():
    """Four at a time take four times as long each, and the port no more time for a token."""
    alone, together = LinkBook(3, 2.0), LinkBook(3, 2.0)
    for number in range(40):
        alone.moved(("p", "d"), MOVED._replace(seconds=0.1), 0.1 * (number + 1))
        together.moved(("p", f"d{number % 4}"), MOVED._replace(seconds=0.4), 0.4 * (1 + number // 4))
    assert alone.port_s_a_token("p") == pytest.approx(0.001)
    assert together.port_s_a_token("p") == pytest.approx(0.001, rel=0.15)
    assert together.move_s(("p", "d0"), 100) == pytest.approx(0.4)


def test_a_port_is_idle_between_transfers_and_while_they_wait_for_their_prefill():
    book = LinkBook(3, 2.0)
    slow = MOVED._replace(seconds=0.5, waited_s=0.4, early_bytes=50_000)
    for number in range(10):
        book.moved(("p", "d"), slow, 10.0 * number)
    assert book.port_s_a_token("p") == pytest.approx(0.001)


def test_while_a_transfer_is_held_others_have_the_port():
    """So two that are held for half of their time get half of it each."""
    book = LinkBook(3, 2.0)
    for number in range(10):
        book.moved((f"p{number % 2}", "d"), MOVED._replace(seconds=0.2, held_s=0.1), 10.0 * number)
    for number in range(10):
        book.moved((f"p{number % 2}", "d"), MOVED._replace(seconds=0.2, held_s=0.1), 100.0 + 10.0 * number)
    rates = [1.0 / (book.port_s_a_token(name) or 1.0) for name in ("p0", "p1")]
    assert sum(rates) == pytest.approx(1000.0)


def test_a_ports_rate_is_known_once_enough_transfers_were_measured_and_follows_the_newest():
    book = LinkBook(3, 2.0)
    for number in range(7):
        book.moved(("p", "d"), MOVED, float(number))
    book.moved(("p", "d"), None, 7.0)
    assert book.port_s_a_token("p") is None
    book.moved(("p", "d"), MOVED, 8.0)
    assert book.port_s_a_token("p") == pytest.approx(0.0001)
    for number in range(60):
        book.moved(("p", "d"), MOVED._replace(seconds=0.1), 9.0 + number)
    assert book.port_s_a_token("p") == pytest.approx(0.001, rel=0.1)
    book.forget("p", {"d"})
    assert book.port_s_a_token("p") is None


def many_to_one(seconds, sources=2, target="d"):
    """Each of the sources sends to one receiver all of the time, and together they send so many seconds a token."""
    book = LinkBook(3, 2.0)
    for number in range(10 * sources):
        moved = MOVED._replace(seconds=sources * seconds * MOVED.tokens)
        book.moved((f"p{number % sources}", target), moved, moved.seconds * (1 + number / sources))
    return book


@pytest.mark.parametrize("sources", [2, 3, 4])
def test_senders_at_the_same_time_show_the_rate_of_the_port_that_receives(sources):
    """Two senders of 1,000 tokens a second each get half of that, if the receiver has as fast a port as each."""
    assert many_to_one(0.001, sources).inbound_s_a_token("d") == pytest.approx(0.001, rel=0.35)


def test_a_receiving_port_is_idle_while_its_senders_are_held():
    """Both send 500 tokens in the same second, and one of them had waited four seconds for its turn before."""
    book = LinkBook(3, 2.0)
    sent = MOVED._replace(tokens=500, seconds=1.0)
    for number in range(20):
        book.moved(("a", "d"), sent._replace(seconds=5.0, held_s=4.0), 10.0 * number)
        book.moved(("b", "d"), sent, 10.0 * number)
    assert book.inbound_s_a_token("d") == pytest.approx(0.001, rel=0.05)


def test_what_passes_before_the_first_kv_is_no_time_of_the_receiving_port():
    """Of the three seconds, each waits two for its source to answer, without being held."""
    book = LinkBook(3, 2.0)
    sent = MOVED._replace(tokens=500, seconds=3.0, span_s=1.0)
    for number in range(20):
        for source in ("a", "b"):
            book.moved((source, "d"), sent, 10.0 * number)
    assert book.inbound_s_a_token("d") == pytest.approx(0.001)


def ends_of(transfers, held_at=None):
    """When each ends, the first to end first. A transfer: tokens, seconds for which it is then held, tokens after that.
    Those that move at the same time share a port of 1,000 tokens/s. `held_at`: gets when each is held."""
    moving, held, resumed, ends, at = {each: float(it[0]) for each, it in enumerate(transfers)}, {}, set(), {}, 0.0
    while moving or held:
        share = 1_000.0 / max(1, len(moving))
        until = min([*(at + left / share for left in moving.values()), *held.values()])
        moving = {each: left - share * (until - at) for each, left in moving.items()}
        at = until
        for each in [each for each, left in moving.items() if left < 1e-6]:
            del moving[each]
            if transfers[each][1] and each not in resumed:
                held[each] = at + transfers[each][1]
                if held_at is not None:
                    held_at[each] = at
            else:
                ends[each] = at
        for each in [each for each, when in held.items() if when <= at]:
            del held[each]
            resumed.add(each)
            moving[each] = float(transfers[each][2])
    return ends


def shared_port(rounds, told=True, pauses=False):
    """What is learned of such a port, of a round of transfers each 20 s. `told`: engines say how long it was from the
    first KV to the end, and with `pauses` when they stood still in between."""
    book = LinkBook(3, 2.0)
    for number, transfers in enumerate(rounds):
        held_at = {}
        for each, end in ends_of(transfers, held_at).items():
            first, held_s, rest = transfers[each]
            held_for = end - held_at[each] if held_s else 0.0
            stood = (held_for, held_for - held_s, first / (first + rest)) if pauses and held_s else ()
            moved = MOVED._replace(
                tokens=first + rest, seconds=end, held_s=held_s, span_s=end if told else 0.0, pauses=stood
            )
            book.moved((f"p{each}", "d"), moved, 20.0 * number + end)
    return book.inbound_s_a_token("d")


STEADY = [(250, 0.0, 0)] * 6
HELD = [(200, 5.0, 50)] * 2 + [(250, 0.0, 0)] * 4


def test_a_transfer_that_is_held_half_way_does_not_make_a_port_look_slow():
    """Each gets a sixth of the port, and two of them are held with their last tokens to come. If they are taken to have
    moved in their last second, the other four have the port for themselves while each gets a sixth of it."""
    assert shared_port([STEADY] * 12) == pytest.approx(0.001, rel=0.05)
    assert shared_port([HELD, STEADY] * 12, told=False) > 0.0011, "engines of an earlier release"
    assert shared_port([HELD, STEADY] * 12) == pytest.approx(0.001, rel=0.05)
    assert shared_port([HELD] * 24) is None, "nobody knows which of them shared it"


HALF_HELD = [(125, 1.0, 125), (100, 2.0, 150), (125, 1.5, 125), (150, 2.5, 100)]


def test_a_port_is_learned_while_all_of_its_transfers_are_held_for_half_of_their_time():
    """Their engines say when, and how much came before, so what comes while at least two of them move is known."""
    assert shared_port([HALF_HELD] * 24) is None, "engines that say only for how long"
    assert shared_port([HALF_HELD] * 24, pauses=True) == pytest.approx(0.001, rel=0.05)
    assert shared_port([HELD] * 24, pauses=True) == pytest.approx(0.001, rel=0.05)


def test_pauses_that_an_engine_does_not_tell_of_leave_its_transfer_out():
    """It tells the longest. This one moved for a second of the twelve, and tells of three that it stood still."""
    book = LinkBook(3, 2.0)
    held = MOVED._replace(tokens=500, seconds=12.0, held_s=11.0, span_s=12.0, pauses=(9.0, 6.0, 0.5))
    for number in range(20):
        for source in ("a", "b"):
            book.moved((source, "d"), held, 20.0 * number)
    assert book.inbound_s_a_token("d") is None


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ([], [(1.0, 2.0)], []),
        ([(1.0, 2.0)], [(2.0, 3.0)], []),
        ([(1.0, 4.0)], [(0.0, 2.0), (3.0, 9.0)], [(1.0, 2.0), (3.0, 4.0)]),
        ([(1.0, 2.0), (3.0, 4.0)], [(1.5, 3.5)], [(1.5, 2.0), (3.0, 3.5)]),
    ],
)
def test_times_that_two_have_in_common(one, other, both):
    assert _common(one, other) == _common(other, one) == both


@pytest.mark.parametrize(
    ("gaps", "left"),
    [
        ([], [(1.0, 2.0), (4.0, 6.0)]),
        ([(0.0, 1.5)], [(1.5, 2.0), (4.0, 6.0)]),
        ([(1.2, 1.4), (1.8, 5.0)], [(1.0, 1.2), (1.4, 1.8), (5.0, 6.0)]),
        ([(2.5, 3.0), (6.0, 7.0)], [(1.0, 2.0), (4.0, 6.0)]),
        ([(0.0, 9.0)], []),
    ],
)
def test_times_without_gaps(gaps, left):
    assert _without([(1.0, 2.0), (4.0, 6.0)], gaps) == left


def test_one_sender_at_a_time_does_not_show_how_much_a_port_receives():
    alone, apart = many_to_one(0.001, sources=1), LinkBook(3, 2.0)
    for number in range(40):
        apart.moved((f"p{number % 2}", "d"), MOVED, float(number))
    assert alone.inbound_s_a_token("d") is apart.inbound_s_a_token("d") is None
    alone.forget("d", set())
    assert alone.inbound_s_a_token("d") is None


def measured():
    """A fleet whose port was measured: the KV of a token takes a millisecond of it."""
    made = fleet()
    for number in range(10):
        name = f"before-{number}"
        ((_, target),) = places(made.handle([done(name, number)], number))
        made.handle([ev.TransferStarted(name, target)], number)
        made.handle([ev.TransferDone(name, target, MOVED._replace(seconds=0.1))], number + 0.1)
        made.handle([ev.Finished(name, 10)], number + 0.2)
    return made


def test_a_migrator_tells_what_has_to_leave_through_a_measured_port():
    made = measured()
    assert made.kv_ports() == {"p": KvPort(pytest.approx(0.001), outgoing=[])}
    made.handle([sent("prefilled", ttft=5.0), done("waits", 20.0, ttft=9.0)], 20.0)
    made.handle([done("landed", 20.0)], 20.0)
    commit(made, "landed", now=20.0)
    rows = made.kv_ports(1000.0)["p"].outgoing
    asked = request("x").prompt_tokens
    assert sorted(rows) == [OutgoingKv("prefilled", 1005.0, asked), OutgoingKv("waits", 1029.0, asked, target="d0")]
    assert fleet().kv_ports() == {}, "nothing was measured yet"


def test_a_migrator_tells_which_ports_that_receive_were_measured():
    made = fleet()
    assert made.inbound("m") == {}
    for number in range(20):
        made.links.moved((f"p{number % 2}", "d0"), MOVED._replace(seconds=0.2), 0.1 * number)
    assert made.inbound("m") == {"d0": pytest.approx(0.001), "d1": 0.0}
    assert made.inbound("another") == {}


def test_orders_that_name_a_transfer_are_told_until_its_kv_has_arrived():
    made = measured()
    made.handle([done("a", 20.0), done("b", 20.0)], 20.0)

    def told(sequence, at, *names, expires_at=30.0):
        reply = made.handle([ev.Orders(sequence, expires_at, dict.fromkeys(names, ("p", 0.5)))], at)
        return prunings(reply)

    assert told(1, 20.1, "a", "gone") == [("prune", "a", "others_in_time")]
    assert told(2, 20.2, "a") == []
    assert told(2, 20.3) == [], "out of sequence"
    assert told(3, 20.4, "b") == [("unprune", "a", "room_again"), ("prune", "b", "others_in_time")]
    commit(made, "b", now=20.5)
    assert told(4, 20.6, "a", "b") == [("prune", "a", "others_in_time")]
    assert prunings(made.handle([ev.Woke()], 30.0)) == [("unprune", "a", "orders_expired")]


def prunings(reply):
    return [(each.decision.kind, each.decision.subject, each.decision.reason) for each in of(reply, ev.Prune)]
