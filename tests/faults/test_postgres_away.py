"""PostgreSQL stopped, and hanging, for 30 s under load."""

from functools import partial

import pytest

from tests.faults.outage import check, hanging, outage, stopped

pytestmark = [pytest.mark.db, pytest.mark.slow]


@pytest.mark.parametrize("fault", [stopped, hanging], ids=["stopped", "hanging"])
def test_the_data_path_does_not_notice(system, postgres, say, fault):
    seen = outage(system, partial(fault, postgres), 30.0)
    check(system, seen, say)
    assert {each.status for each in seen.workflows.told} == {201}, "forks and workflows are Redis' business"
    system.until(lambda: seen.workflows.counted() == (seen.workflows.steady,) * 2)
    pages = [page for page in seen.watch.pages_between(seen.began + 1, seen.ended - 11) if page.status != 200]
    assert pages, "no page said that PostgreSQL is unavailable"
    assert all("The database is unavailable" in page.text for page in pages)
    # The first look finds out, waiting as long as it must; later ones know.
    slowest = max(page.took_s for page in seen.watch.pages_between(seen.began + 15, seen.ended - 1))
    assert slowest < 1.5, "pages waited for a server that was known to be away"
    frames = seen.watch.frames_between(seen.began + 2, seen.ended)
    assert frames, "the live page stood still: its figures come from Redis"
    assert max(frame.gap_s for frame in frames) < 5.0
