"""From a gateway without any instance to the scaler: requests that it holds or refuses bring a fleet of none back."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import cast

import pytest

from api.openai.status import fleet_message
from controller.core.messages import FleetMessage
from controller.core.snapshot import ComingConfig
from controller.scale import FleetObservation, ScaleAction, ScaleOut, Scaler, ScalerMemory, ScalingConfig
from controller.scale.observation import InstanceRow, observe
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.waiting import until_on_loop

CONFIG = ScalingConfig("demo", min_instances=0, max_instances=2)
STARTING = InstanceRow("new", "running", "pending", False)


def seen(message: FleetMessage, *rows: InstanceRow) -> FleetObservation:
    return observe(rows, [message], time.time(), "demo")


def decided(look: FleetObservation) -> list[ScaleAction]:
    return Scaler().decide(CONFIG, ScalerMemory(), look, 1000.0)[1]


async def test_a_refused_request_starts_an_instance_and_the_next_waits_for_it() -> None:
    none = snapshot(())
    async with TestBed(none) as bed:
        assert decided(seen(fleet_message(bed.gateway, 1, []))) == []
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        refused = seen(fleet_message(bed.gateway, 2, []))
        assert (refused.arrival_rate, refused.queued) == (pytest.approx(0.1), 0)
        assert decided(refused) == [ScaleOut(1)]
        bed.gateway.configure(replace(none, version=none.version + 1, coming=(ComingConfig("new", "demo"),)))
        assert (await bed.ask(completion(waiting_time=0.05))).status == 504, "it waited, in vain"
        assert decided(seen(fleet_message(bed.gateway, 3, []), STARTING)) == []


async def test_a_request_that_waits_for_a_model_on_demand_starts_an_instance_however_long_it_waits() -> None:
    none = snapshot(())
    async with TestBed(replace(none, on_demand=("demo",))) as bed:
        client = bed.send(completion(waiting_time=60, target_ttft=20))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 1)
        message = fleet_message(bed.gateway, 1, [])
        waits = seen(message)
        assert (waits.queued, waits.load) == (1, math.inf)
        assert decided(waits) == [ScaleOut(1)]
        assert decided(seen(message, STARTING)) == [], "one is enough"
        # Its arrival counts for RATE_WINDOW_S only; a cool-down or the wait for a device may last longer.
        traffic = {**message["models"]["demo"], "arrival_rate": 0.0, "wait_over_slo": 0.1}
        later = seen(cast(FleetMessage, {**message, "models": {"demo": traffic}}))
        assert decided(later) == [ScaleOut(1)]
        await client.hang_up()
