"""The ordering of waiting requests, exchanged while a gateway runs."""

from __future__ import annotations

from dataclasses import replace

from api.openai import status
from tests.api.openai.gateways import TestBed, completion, snapshot


async def test_a_chosen_ordering_is_used_from_the_next_event_and_one_that_is_not_known_leaves_it(caplog):
    async with TestBed(snapshot()) as bed:
        gateway = bed.gateway
        assert status.health(gateway)[1]["ordering"] == "feasible_deadlines"
        chosen = replace(gateway.snapshot, ordering="calm", ordering_options={"frame_steps": 100})
        gateway.configure(chosen)
        assert (await bed.ask(completion())).status == 200
        assert status.health(gateway)[1]["ordering"] == "calm"
        gateway.configure(replace(chosen, ordering="of_a_newer_release"))
        assert (await bed.ask(completion())).status == 200
        assert status.health(gateway)[1]["ordering"] == "calm"
        assert "the chosen ordering is not used: unknown ordering 'of_a_newer_release'" in caplog.text
        gateway.configure(replace(chosen, ordering="", ordering_options={}))
        assert (await bed.ask(completion())).status == 200
        assert status.health(gateway)[1]["ordering"] == "feasible_deadlines"
