"""The traffic that the scaler sizes stages by, counted alike by gateways and the simulator."""

from __future__ import annotations

import pytest

from controller.scale.traffic import NO_TRAFFIC, ModelRates, RateMeter, StageRates, model_traffic, stage_traffic


def test_a_rate_is_over_the_last_ten_seconds():
    meter = RateMeter()
    for at in (0.0, 1.0, 9.0):
        meter.tick(at)
    assert meter.rate(9.5) == pytest.approx(0.3)
    assert meter.rate(10.5) == pytest.approx(0.2)
    assert meter.rate(100.0) == 0.0


def test_beside_a_collocated_instance_prefill_gets_its_share_and_decode_what_was_prefilled():
    """Ten requests in ten seconds: six to two prefill instances, of which five end their prefill and four their answer;
    four to a collocated instance, all of which end."""
    arrived, finished, rates = ModelRates(), ModelRates(), StageRates()
    for number in range(10):
        arrived.tick("m", 1.0)
        rates.sent("m", 1.0, prefill=number < 6)
    for _ in range(5):
        rates.prefilled("m", 2.0)
    for _ in range(4):
        rates.decoded("m", 3.0)
    for _ in range(8):
        finished.tick("m", 3.0)
    found = model_traffic(5.0, arrived.rates(5.0), finished.rates(5.0), rates, {"m": (3, 0.5)}, {"m": (1, 0.25)})
    prefill, decode = stage_traffic(found["m"], "prefill"), stage_traffic(found["m"], "decode")
    assert (prefill["arrival_rate"], prefill["service_rate"]) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (decode["arrival_rate"], decode["service_rate"]) == (pytest.approx(0.5), pytest.approx(0.4))
    assert (prefill["queued"], prefill["wait_over_slo"], decode["queued"], decode["wait_over_slo"]) == (3, 0.5, 1, 0.25)


def test_without_disaggregated_requests_every_stage_sees_the_model():
    found = model_traffic(5.0, {"m": 2.0}, {"m": 1.5}, StageRates(), {"m": (3, 0.5)}, {})
    assert "stages" not in found["m"]
    assert stage_traffic(found["m"], "collocated") == {
        "arrival_rate": 2.0, "service_rate": 1.5, "queued": 3, "wait_over_slo": 0.5,
    }  # fmt: skip
    assert stage_traffic(NO_TRAFFIC, "decode")["queued"] == 0
