"""One answer for all who ask within a moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from console.live.ttl_cache import TtlCache


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_it_is_made_again_only_when_it_is_old():
    clock, made = Clock(), []
    kept = TtlCache(5.0, clock)

    def make():
        made.append(clock.now)
        return len(made)

    assert [kept.get(make), kept.get(make)] == [1, 1]
    clock.now = 4.9
    assert kept.get(make) == 1
    clock.now = 5.0
    assert kept.get(make) == 2


def test_many_who_ask_at_once_get_one_answer():
    kept, made = TtlCache(60.0), []
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: kept.get(lambda: made.append(1) or "same"), range(200)))
    assert (set(answers), len(made)) == ({"same"}, 1)


def test_an_error_is_not_kept():
    kept = TtlCache(60.0)
    with pytest.raises(ZeroDivisionError):
        kept.get(lambda: 1 / 0)
    assert kept.get(lambda: "well") == "well"
