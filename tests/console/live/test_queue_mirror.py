"""Merged differences: the picture equals what gateways hold, or knows that it does not, whatever is lost on the way."""

from __future__ import annotations

import random

import pytest

from api.openai.state.queue_feed import QueueFeed
from console.live.queue_mirror import GONE_AFTER_S, QueueMirror
from console.live.queue_view import RowWindow, ids_in, predicted_start, queue_frame, window_of
from controller.core import events as ev
from controller.dispatch import build_dispatcher
from tests.console.live.live_data import NOON, queue_changes, queue_row, queue_state
from tests.controller.dispatch.fleet import request, up


def synced(*rows, **fields):
    mirror = QueueMirror()
    mirror.take_whole(queue_state(*rows, **fields), NOON)
    assert not mirror.behind
    return mirror


def test_changes_add_replace_and_remove_rows_in_the_order_of_their_slack():
    mirror = synced(queue_row("a", NOON + 3), queue_row("b", NOON + 1))
    new, moved = queue_row("c", NOON + 2), queue_row("a", NOON + 3, paused=True)
    mirror.take(queue_changes(1, new, moved, gone=("b",), total=2), NOON + 1)
    assert list(mirror.ids()) == ["c", "a"]
    assert mirror.shown("a").row["paused"]
    assert mirror.shown("b") is None
    assert not mirror.behind


def test_what_comes_before_the_whole_state_is_kept_and_applied_after_it():
    mirror = QueueMirror()
    mirror.take(queue_changes(7, queue_row("b"), total=2), NOON)
    assert mirror.behind
    mirror.take_whole(queue_state(queue_row("a"), version=7), NOON)
    assert not mirror.behind
    assert set(mirror.ids()) == {"a", "b"}


def test_a_lost_message_is_noticed_by_the_next_and_put_right_by_a_whole_state():
    mirror = synced(queue_row("a"))
    mirror.take(queue_changes(2, gone=("a",), total=1), NOON + 2)  # 1 -> 2 brought b and was lost
    assert mirror.behind
    assert list(mirror.ids()) == ["a"], "what is known stays until something better comes"
    mirror.take_whole(queue_state(queue_row("a"), version=1), NOON + 2)
    assert mirror.behind, "an old whole state does not help"
    mirror.take_whole(queue_state(queue_row("a"), queue_row("b"), version=2), NOON + 2)
    assert not mirror.behind
    assert list(mirror.ids()) == ["b"]


def test_the_last_message_lost_is_noticed_by_one_without_changes():
    mirror = synced(queue_row("a"))
    mirror.take(queue_changes(2, total=2), NOON + 2)
    assert mirror.behind


def test_a_count_that_does_not_agree_is_not_believed():
    mirror = synced(queue_row("a"))
    mirror.take(queue_changes(1, queue_row("b"), total=5), NOON + 1)
    assert mirror.behind
    mirror.take_whole(queue_state(*(queue_row(name) for name in "abcde"), version=2), NOON + 1)
    assert (mirror.behind, len(mirror)) == (False, 5)


def test_messages_that_come_twice_or_late_change_nothing():
    mirror = synced(queue_row("a"))
    first, second = queue_changes(1, queue_row("b"), total=2), queue_changes(2, gone=("a",), total=1)
    for each in (first, first, second, first, second):
        mirror.take(each, NOON + 2)
    assert (list(mirror.ids()), mirror.behind) == (["b"], False)


def test_a_gateway_that_starts_again_is_a_new_feed():
    mirror = synced(queue_row("a"), queue_row("b"))
    mirror.take(queue_changes(0, queue_row("c"), total=1, feed="f2", at=NOON + 9), NOON + 9)
    assert mirror.behind
    mirror.take_whole(queue_state(queue_row("a"), version=9), NOON + 9)
    assert mirror.behind, "the old feed's state, still in Redis"
    mirror.take_whole(queue_state(feed="f2", version=0), NOON + 9)
    assert (list(mirror.ids()), mirror.behind) == (["c"], False)


def test_gateways_are_merged_and_one_that_dies_takes_its_rows_with_it():
    mirror = synced(queue_row("a", NOON + 1), queue_row("c", NOON + 3, slo_class="batch"))
    mirror.take_whole(queue_state(queue_row("b", NOON + 2), gateway="gateway-2", feed="g"), NOON)
    assert list(mirror.ids()) == ["a", "b", "c"]
    assert mirror.kinds() == [(("acme", "batch"), 1, NOON + 3), (("acme", "chat"), 2, NOON + 1)]
    later = NOON + GONE_AFTER_S + 1
    mirror.take(queue_changes(1, total=2, at=later), later)
    mirror.forget_silent(later)
    assert (list(mirror.ids()), mirror.gateways) == (["a", "c"], 1)
    mirror.take_whole(queue_state(queue_row("b"), gateway="gateway-2", feed="g"), later)
    assert mirror.gateways == 1, "what a dead gateway left in Redis does not bring it back"


def test_a_filter_finds_ids_tenants_classes_and_models():
    mirror = synced(queue_row("req-1"), queue_row("req-2", tenant="Globex", slo_class="batch", model="big"))
    for text in ("REQ-2", "glob", "batch", "big"):
        assert list(mirror.ids(text=text)) == ["req-2"], text
    assert list(mirror.ids(("Globex", "batch"))) == ["req-2"]
    assert list(mirror.ids(("Globex", "chat"))) == []


def test_a_start_is_predicted_from_the_dispatchers_order_and_what_was_served_lately():
    mirror = synced(
        queue_row("urgent", NOON + 1, order=[0.0, 2.0]),
        queue_row("first", NOON + 9, order=[0.0, 1.0]),
        queue_row("hopeless", NOON - 9, order=[1.0, 0.0], hopeless=True),
        queue_row("held", NOON + 5, order=[2.0], paused=True),
        queue_row("other", NOON + 5, model="cold"),
        rates={"demo": 2.0},
    )
    starts = {each: predicted_start(mirror.shown(each)) for each in mirror.ids()}
    assert starts == {"first": NOON + 0.5, "urgent": NOON + 1, "hopeless": None, "held": None, "other": None}


def test_a_window_is_a_slice_and_stays_within_what_there_is():
    mirror = synced(*(queue_row(f"r{n:04}", NOON + n) for n in range(1000)))
    frame = queue_frame(mirror, window := RowWindow(offset=500, limit=20), ids_in(mirror, window))
    assert [row["id"] for row in frame["rows"]] == [f"r{n:04}" for n in range(500, 520)]
    assert (frame["total"], frame["matching"], frame["offset"]) == (1000, 1000, 500)
    frame = queue_frame(mirror, window := RowWindow(offset=5000, limit=20, text="r000"), ids_in(mirror, window))
    assert [row["id"] for row in frame["rows"]] == [f"r000{n}" for n in range(10)]
    assert (frame["total"], frame["matching"], frame["offset"]) == (1000, 10, 0)
    assert (frame["key"], frame["text"]) == ("", "r000"), "what it answers"


def test_a_paused_view_keeps_its_order_and_shows_what_has_left():
    mirror = synced(queue_row("a", NOON + 1), queue_row("b", NOON + 2))
    held = list(mirror.ids())
    mirror.take(queue_changes(1, queue_row("new", NOON), gone=("a",), total=2), NOON + 1)
    rows = queue_frame(mirror, RowWindow(held=True), held)["rows"]
    assert rows[0] == {"id": "a", "left": True}
    assert [row["id"] for row in rows] == ["a", "b"]


@pytest.mark.parametrize(
    "message",
    [
        {"offset": -1}, {"offset": "0"}, {"offset": True}, {"limit": 0}, {"limit": 201}, {"limit": None},
        {"key": 7}, {"text": "x" * 101}, {"held": "yes"}, {"rows": 3},
    ],
)  # fmt: skip
def test_a_window_that_makes_no_sense_is_refused(message):
    assert window_of({"type": "view", **message}) is None


# ---- from the dispatcher to the picture -----------------------------------------------------------------------------


class Wire:
    """A dispatcher, its feed, and a mirror that hears a part of it; the whole state is delivered when it is wanted."""

    def __init__(self, seed: int, lost: float) -> None:
        self.random = random.Random(seed)
        self.lost = lost
        self.dispatcher = build_dispatcher("slackline")
        self.dispatcher.handle([up(slots=2)], 0.0)
        self.mirror = QueueMirror()
        self.feed = QueueFeed("gateway-1", self.dispatcher, NOON)
        self.now, self.serial, self.wholes = 0.0, 0, 0

    def happen(self) -> None:
        self.now += 0.05
        waiting = self.dispatcher.queue().ids()
        kind = self.random.choice(["arrive", "arrive", "arrive", "cancel", "pause", "resume", "reprioritise", "finish"])
        event: ev.Event = ev.Woke()
        if kind == "arrive" or not waiting:
            self.serial += 1
            targets = {"ttft": self.random.choice([0.2, 2.0, 20.0]), "slo_class": self.random.choice(["chat", "batch"])}
            event = ev.Arrived(request(f"r{self.serial}", self.now, **targets))
        elif kind == "cancel":
            event = ev.Cancelled(self.random.choice(waiting))
        elif kind == "finish":
            event = ev.Finished(f"r{self.random.randint(1, self.serial)}", 1)
        else:
            event = ev.Command("c", "op", kind, (self.random.choice(waiting),), self.random.randint(0, 3))
        self.dispatcher.handle([event], self.now)

    def tick(self, at: float) -> None:
        changes = self.feed.changes({"demo": 1.0}) | {"at": at}
        if self.random.random() >= self.lost:
            self.mirror.take(changes, at)
        if self.mirror.behind and self.random.random() < 0.5:
            self.wholes += 1
            self.mirror.take_whole(self.feed.whole({"demo": 1.0}, 1), at)

    def held(self) -> dict:
        queue = self.dispatcher.queue()
        return {request_id: queue.row(request_id, NOON) for request_id in queue.ids()}


@pytest.mark.parametrize(("seed", "lost"), [(1, 0.0), (2, 0.2), (3, 0.6)])
async def test_the_mirror_equals_the_queue_whatever_was_lost(seed, lost):
    wire = Wire(seed, lost)
    for _ in range(60):
        wire.happen()
    await wire.feed.start()
    for step in range(400):
        for _ in range(wire.random.randint(0, 4)):
            wire.happen()
        wire.tick(NOON + step)
        if not wire.mirror.behind and wire.mirror.gateways and not lost:
            assert {each: wire.mirror.shown(each).row for each in wire.mirror.ids()} == wire.held()
    wire.lost = 0.0
    for step in range(400, 440):
        wire.tick(NOON + step)
    assert not wire.mirror.behind
    assert {each: wire.mirror.shown(each).row for each in wire.mirror.ids()} == wire.held()
    assert len(wire.held()) > 10
    assert (wire.wholes == 1) is (lost == 0.0), "a whole state at the start, and one for what was lost"


async def test_a_queue_read_in_parts_while_it_changes_is_right_after_the_next_changes(monkeypatch):
    monkeypatch.setattr("api.openai.state.queue_feed.ROWS_AT_ONCE", 5)
    wire = Wire(4, 0.0)
    for _ in range(100):
        wire.happen()

    async def meanwhile(_seconds: float) -> None:
        wire.happen()

    monkeypatch.setattr("api.openai.state.queue_feed.asyncio.sleep", meanwhile)
    await wire.feed.start()
    changes = wire.feed.changes({})
    while wire.feed.behind:
        changes = wire.feed.changes({})
    assert changes["total"] == len(wire.held())
    assert {row["id"]: row for row in wire.feed.whole({}, 1)["rows"]} == wire.held()
    wire.feed.stop()
    assert not wire.dispatcher.journal.following


async def test_a_tick_in_which_nothing_happened_says_so_in_few_words():
    wire = Wire(5, 0.0)
    for _ in range(50):
        wire.happen()
    await wire.feed.start()
    wire.feed.changes({})
    again = wire.feed.changes({})
    assert (again["put"], again["gone"], again["base"]) == ([], [], again["version"])


async def test_a_queue_that_moves_at_once_is_told_in_messages_of_bounded_size(monkeypatch):
    """All are predicted again, then all but a few are cancelled: each message is a step that the picture can take."""
    monkeypatch.setattr("api.openai.state.queue_feed.ROWS_AT_ONCE", 50)
    wire = Wire(6, 0.0)
    targets = {"ttft": 60.0, "slo_class": "chat"}
    wire.dispatcher.handle([ev.Arrived(request(f"r{n}", 0.0, **targets)) for n in range(1, 1001)], 0.0)
    wire.serial = 1000
    await wire.feed.start()
    wire.mirror.take_whole(wire.feed.whole({}, 1), NOON)
    waiting = wire.dispatcher.queue().ids()
    commands = (("reprioritise", tuple(waiting), 3), ("cancel", tuple(waiting[:900]), None))
    for number, (kind, ids, priority) in enumerate(commands):
        wire.now = 5.0 * (1 + number)
        wire.dispatcher.handle([ev.Command("c", "op", kind, ids, priority)], wire.now)
        messages = [wire.feed.changes({})]
        while wire.feed.behind:
            messages.append(wire.feed.changes({}))
            wire.happen()  # it goes on meanwhile
        assert len(messages) >= 900 / 50
        assert max(len(each["put"]) + len(each["gone"]) for each in messages) <= 50
        for each in messages:
            wire.mirror.take(each, NOON)
            assert not wire.mirror.behind
    wire.mirror.take(wire.feed.changes({}), NOON)
    assert {each: wire.mirror.shown(each).row for each in wire.mirror.ids()} == wire.held()


async def test_messages_of_one_moment_and_of_a_clock_set_back_are_taken(monkeypatch):
    monkeypatch.setattr("api.openai.state.queue_feed.time.time", lambda: NOON)
    wire = Wire(7, 0.0)
    await wire.feed.start()
    wire.feed.changes({})
    wire.mirror.take_whole(wire.feed.whole({}, 1), NOON)
    for _ in range(5):
        wire.happen()
        wire.mirror.take(wire.feed.changes({}), NOON)
        monkeypatch.setattr("api.openai.state.queue_feed.time.time", lambda: NOON - 60)
    assert not wire.mirror.behind
    assert {each: wire.mirror.shown(each).row for each in wire.mirror.ids()} == wire.held()
