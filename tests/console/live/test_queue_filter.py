"""What a person types, and which waiting requests it finds."""

from __future__ import annotations

import pytest

from console.live.queue_filter import haystack, words_of
from console.live.queue_mirror import QueueMirror
from tests.console.live.live_data import NOON, queue_row, queue_state

ROW = queue_row("req-17", tenant="Acme", slo_class="chat", model="org/Big:8b")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("req-1", True),
        ("REQ-17", True),
        ("acme chat", True),
        ("acme batch", False),
        ("big:8b", True),
        ("tenant:acme", True),
        ("tenant:acm", False),
        ("tenant:acme class:chat", True),
        ("tenant:acme class:batch", False),
        ("model:org/big:8b", True),
        ("id:req-1", False),
        ("id:req-17", True),
        ("tenant:", False),  # a word like any other
        ("", True),
    ],
)
def test_words_are_found_anywhere_and_named_fields_whole(text, found):
    assert words_of(text).match(ROW, haystack(ROW)) is found


def test_one_is_found_among_ten_thousand_and_forgotten_when_it_leaves():
    mirror = QueueMirror()
    rows = [queue_row(f"req-{n:05}", NOON + n, tenant=f"tenant-{n % 7}") for n in range(10_000)]
    mirror.take_whole(queue_state(*rows), NOON)
    assert mirror.ids(text="req-04711") == ["req-04711"]
    assert len(mirror.ids(text="tenant:tenant-3")) == len(range(3, 10_000, 7))
    assert mirror.ids(text="tenant-3 req-00003") == ["req-00003"]
    mirror.take_whole(queue_state(*rows[:10], gateway="gateway-1", version=2), NOON)
    assert len(mirror.ids()) == 10_000, "not asked for"
    mirror.forget_silent(NOON + 60)
    assert (mirror.ids(text="req"), mirror._texts) == ([], {})
