"""Redis stopped, and hanging, for 20 s under load."""

from functools import partial

import pytest

from tests.faults.outage import check, hanging, outage, stopped

pytestmark = [pytest.mark.db, pytest.mark.slow]


@pytest.mark.parametrize("fault", [stopped, hanging], ids=["stopped", "hanging"])
def test_the_data_path_does_not_notice_and_the_live_page_says_stale(system, redis_server, say, fault):
    seen = outage(system, partial(fault, redis_server), 20.0)
    check(system, seen, say)
    frames = seen.watch.frames_between(seen.began + 8, seen.ended)
    assert frames, "the socket fell silent"
    assert all(frame.stale for frame in frames)
    assert max(frame.gap_s for frame in frames) < 5.0
    assert any(frame.content["reason"] == "Redis is away" for frame in frames)
    pages = seen.watch.pages_between(seen.began + 5, seen.ended - 2)
    assert all("No gateway reports now" in page.text for page in pages), "a page showed old figures as current ones"
