"""Measured points belong to the engine that did the work, and one rule says which fit speaks for it."""

from __future__ import annotations

import pytest

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.selectors.experiments.fleet_model import fleet_today
from controller.selectors.fleet.measured import Measured, measurements, profile_of
from controller.selectors.snapshot import gateway_snapshot
from controller.services.fleet.served_models import latency_profile_set
from tests import factories

pytestmark = pytest.mark.django_db
SPEED = LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 1e-7, 1e-4)
FASTER = SPEED._replace(decode_a=0.01)


def prefilled(at: float) -> dict:
    return {"kind": "prefill", "reason": "prefilled", "at": at, "figures": {"instance": "p"}}


def test_prefill_points_are_the_prefill_instances_and_decode_points_the_decode_instances():
    shared = {"instance": "d", "prefill_instance": "p", "queue_s": 0.1, "ttft_s": 0.9, "tpot_s": 0.05}
    factories.records_stored(
        factories.record(prompt_tokens=500, output_tokens=8, decisions=[prefilled(0.2), prefilled(0.6)], **shared),
        factories.record(instance="p", queue_s=0.1, ttft_s=0.4, tpot_s=0.02),  # one engine did it all
    )

    assert measurements("d") == [Measured(500, 8, None, 0.05)], "its first token's time holds another engine's work"
    whole, prefill = measurements("p")
    assert (whole.prefill_s, whole.tpot_s) == (pytest.approx(0.3), 0.02)
    assert (prefill.prompt_tokens, prefill.prefill_s, prefill.tpot_s) == (500, pytest.approx(0.5), None)


def test_an_answer_in_one_piece_measures_its_prefill_too():
    whole = {"streamed": False, "ttft_s": None, "tpot_s": None, "instance": "d", "prefill_instance": "p"}
    factories.records_stored(
        factories.record(queue_s=0.1, decisions=[prefilled(0.35)], **whole),
        factories.record(queue_s=0.1, decisions=[], **whole),  # written before prefills were noted
    )
    assert [point.prefill_s for point in measurements("p")] == [pytest.approx(0.25)]
    assert measurements("d") == []


@pytest.mark.parametrize("role", ["prefill", "decode", "collocated"])
def test_gateway_preview_and_page_take_the_same_fit(role):
    model = factories.served_model()
    latency_profile_set(actor=factories.ACTOR, model=model, device_kind="a100", coefficients=SPEED)
    latency_profile_set(actor=factories.ACTOR, model=model, device_kind="a100", role="decode", coefficients=FASTER)
    row = factories.instance(model, device_kind="a100", role=role)
    expected = FASTER if role == "decode" else SPEED  # a role without a fit of its own takes the collocated one

    assert gateway_snapshot().instances[0].latency == expected
    (group,) = fleet_today(model.name)
    assert LatencyCoefficients(**group["profile"]) == expected
    assert group.get("role", "collocated") == role
    found = profile_of(row)
    assert found is not None
    assert LatencyCoefficients(**found.coefficients) == expected


def test_the_fit_of_another_device_kind_is_not_used():
    model = factories.served_model()
    latency_profile_set(actor=factories.ACTOR, model=model, device_kind="a100", coefficients=SPEED)
    row = factories.instance(model, device_kind="l4")

    assert profile_of(row) is None
    assert gateway_snapshot().instances[0].latency is None
    with pytest.raises(ConfigError, match="no latency profile"):
        fleet_today(model.name)
