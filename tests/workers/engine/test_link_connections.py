"""Kept connections of a link, without sockets."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from workers.engine.kv_links import KEPT, Link, Peer
from workers.engine.kv_transfer import Connection


@pytest.fixture
def link() -> Link:
    return Link(Peer("p", "10.0.0.1", 9000), "token", announced=True)


def connection() -> Mock:
    return Mock(spec=Connection, gone=False)


async def test_a_few_are_kept_and_the_rest_are_closed(link: Link) -> None:
    made = [connection() for _ in range(KEPT + 1)]
    for each in made:
        link.give_back(each)
    assert [each.close.called for each in made] == [False] * KEPT + [True]
    assert await link.take() == (made[KEPT - 1], False)


def test_one_that_comes_back_after_the_link_was_forgotten_is_closed(link: Link) -> None:
    """A transfer was under way over it: nobody would take or close it any more."""
    late = connection()
    link.close()
    link.give_back(late)
    assert late.close.called
