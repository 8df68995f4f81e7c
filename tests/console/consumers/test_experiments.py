"""Experiments over their topic: from the database first, then word by word; late and lost words do no harm."""

from __future__ import annotations

import pytest

from console.consumers import experiments
from console.consumers.experiments import ExperimentsConsumer
from controller.core.messages import LIVE_EXPERIMENTS
from tests.console.consumers.test_base import frames, is_data
from tests.console.consumers.test_topics import tell


def state(progress=0.0, now="running", slug="one", **fields):
    return {"slug": slug, "state": now, "progress": progress, "step": "", "waiting": False, **fields}


@pytest.fixture
def stored(monkeypatch):
    rows = []

    async def moving():
        return list(rows)

    monkeypatch.setattr(experiments, "moving", moving)
    return rows


def told(each):
    return {name: each[name] for name in ("slug", "state", "progress", "step")}


async def newest(socket, wanted):
    found = await frames(socket, lambda frame: is_data(frame) and wanted in frame["data"]["experiments"])
    return found[-1]


async def test_progress_comes_live_after_what_is_stored(browser, live_store, stored, layer):
    stored.append(state(0.1))
    socket = browser(ExperimentsConsumer)
    await socket.connect()
    assert (await newest(socket, state(0.1)))["type"] == "snapshot"
    await tell(layer, LIVE_EXPERIMENTS, told(state(0.4)))
    assert (await newest(socket, state(0.4)))["data"]["experiments"] == [state(0.4)]


async def test_a_late_word_turns_nothing_back(browser, live_store, stored, layer):
    socket = browser(ExperimentsConsumer)
    await socket.connect()
    await frames(socket, is_data)  # it has joined
    for each in (state(0.6), state(0.5), state(1.0, "done"), state(0.7)):
        await tell(layer, LIVE_EXPERIMENTS, told(each))
    await newest(socket, state(1.0, "done"))
    await socket.say('{"type": "refetch"}')
    snapshot = (await frames(socket, lambda frame: frame["type"] == "snapshot"))[-1]
    assert snapshot["data"]["experiments"] == [state(1.0, "done")]


async def test_what_pub_sub_lost_is_found_in_the_database(browser, live_store, stored):
    socket = browser(ExperimentsConsumer)
    await socket.connect()
    await frames(socket, is_data)
    stored.append(state(0.3, waiting=True))
    assert (await newest(socket, state(0.3, waiting=True)))["type"] == "update"
