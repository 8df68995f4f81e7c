"""What a borrower and a lender tell each other of layers while a prefix is copied, with both engines in one process."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controller.core.steps import PrefixEnded
from tests.waiting import until_on_loop
from tests.workers.engine.kv.sides import LAYERS, PROMPT, Side
from tests.workers.flowd.running import connected, serving
from workers.engine.kv.lender import tokens_as_bytes
from workers.engine.kv.transfer import KvConnection, KvTraffic
from workers.flowd.client import FlowClient

COPIED = 320  # tokens of the prompt
WHO = {"unit": "mine", "batch": "r"}


class Both:
    """A lender that asks a daemon, and a borrower. `said`: what the lender said to the daemon, by `op`."""

    def __init__(self, client: FlowClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lender, self.borrower = Side(flows=client), Side()
        self.said: list[dict[str, Any]] = []
        say = client.say

        def heard(message: dict[str, Any]) -> None:
            self.said.append(message)
            say(message)

        monkeypatch.setattr(client, "say", heard)

    async def connection(self) -> KvConnection:
        self.lender.computes(PROMPT)
        await self.borrower.link_to(self.lender)
        (link,) = self.borrower.stages.links.up()
        return (await link.take())[0]

    async def copy(self, connection: KvConnection, computes: Callable[[], int | None], **about: Any) -> dict[str, Any]:
        """What the lender says of its turns."""
        prefix = self.borrower.seq(PROMPT[:COPIED])
        assert self.borrower.engine.borrow(prefix)
        prompt = tokens_as_bytes(array("q", PROMPT))
        store = self.borrower.store
        try:
            return await connection.borrow(prefix, prompt, store, KvTraffic(), {**WHO, **about}, computes=computes)
        finally:
            self.borrower.engine.handle(PrefixEnded(prefix, 0))

    def layers(self, op: str) -> list[int]:
        return [message["layer"] for message in self.said if message["op"] == op and "layer" in message]

    def close(self) -> None:
        for side in (self.lender, self.borrower):
            side.stages.close()


@asynccontextmanager
async def both(path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Both]:
    async with serving(path), connected(path) as client:
        made = Both(client, monkeypatch)
        try:
            yield made
        finally:
            made.close()


async def test_the_daemon_hears_which_layer_is_sent_and_which_is_computed(path, monkeypatch):
    async with both(path, monkeypatch) as made:
        connection = await made.connection()
        told = await made.copy(connection, lambda: 0, overlaps=True)
        assert told["flow"] == "scheduled"
        await connection.ping()  # after the reports the connection serves the next question
        assert made.layers("progress") == [*range(LAYERS)]
        assert set(made.layers("layer")) == {0}
        units = {message.get("unit") for message in made.said if message["op"] in ("submit", "layer", "computed")}
        assert units == {"mine/r"}
        await until_on_loop(lambda: made.said[-1]["op"] == "computed")
        connection.close()


@pytest.mark.parametrize("about", [{}, {"overlaps": False}, {"overlaps": "yes"}])
async def test_a_prompt_that_waits_for_all_of_it_reports_nothing(path, monkeypatch, about):
    """Nor does an engine of an older version: all layers stay as urgent as the first."""
    async with both(path, monkeypatch) as made:
        connection = await made.connection()
        assert (await made.copy(connection, lambda: 0, **about))["flow"] == "scheduled"
        await connection.ping()
        assert (made.layers("progress"), made.layers("layer")) == ([], [])
        connection.close()


async def test_without_a_daemon_no_reports_are_asked_for(monkeypatch):
    made = Both(FlowClient("/nowhere"), monkeypatch)
    try:
        connection = await made.connection()
        assert (await made.copy(connection, lambda: 0, overlaps=True))["flow"] == "unavailable"
        await connection.ping()
        assert made.layers("layer") == []
        connection.close()
    finally:
        made.close()


@pytest.mark.parametrize("layer", [LAYERS, True, 0.5])
async def test_a_wrong_report_ends_the_connection_and_says_why(path, monkeypatch, layer, caplog):
    async with both(path, monkeypatch) as made:
        connection = await made.connection()
        with caplog.at_level(logging.WARNING):
            await made.copy(connection, lambda: layer, overlaps=True)  # which has come whole
            await until_on_loop(lambda: f"layer must be between 0 and {LAYERS - 1}, not {layer!r}" in caplog.text)
        assert made.layers("layer") == []
        connection.close()
