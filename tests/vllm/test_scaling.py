"""A second real vLLM that the scaler starts under load, and the drain after it.

It takes three minutes, so `.ci/run` leaves it out: `make test-vllm` runs it.
"""

from __future__ import annotations

import time

import pytest

from tests.faults.load import Load
from tests.vllm.launched import START_S

pytestmark = [pytest.mark.vllm, pytest.mark.db]

SLOTS = 4  # so few that a small load fills them
BODY = {"max_tokens": 40, "ignore_eos": True, "target_ttft": 3.0, "target_tbt": 0.5, "waiting_time": 60.0}


@pytest.mark.thorough
def test_a_second_vllm_starts_under_load_and_is_drained_after_it(launched, figures):
    model = launched("twofold", SLOTS)
    system = model.system
    began = time.monotonic()
    first = model.start_first()
    figures["first_ready_s"] = round(time.monotonic() - began, 1)
    sustain_s = 3.0
    model.scale(max_instances=2, upper=0.6, sustain_s=sustain_s)
    body = {**BODY, "model": model.model}
    with Load(system, rate=1, body=body) as before:
        system.until(lambda: before.served(first) >= 5, 60.0)
    with Load(system, rate=4, body=body) as during:
        system.until(lambda: model.decisions("scale_out_served"), START_S)
        served_at = time.monotonic()
        system.until(lambda: time.monotonic() > served_at + 10.0, 20.0)  # both serve
    with Load(system, rate=1, body=body) as after:
        system.until(lambda: len(model.instances()) == 1, 240.0)  # the load is low for as long as a start takes
        system.until(lambda: list(model.instances("stopped").values()) == ["stopped"], 60.0)
    sent = [*before.sent, *during.sent, *after.sent]
    lost = [each.ended for each in sent if each.ended != "done"]
    [(_, reason, _, outcome)] = model.decisions("scale_out")
    [second] = outcome["started"]
    later = [each for each in during.sent if each.at >= served_at]
    figures["scale_out_s"] = model.scale_out_s(second)
    figures["lost"] = len(lost)
    figures["attainment"] = {
        "before": model.attained(before.sent),
        "during": model.attained(during.sent),
        "with_both": model.attained(later),
        "after": model.attained(after.sent),
    }
    figures["requests"] = len(sent)
    assert lost == []
    assert reason == "load_above_upper"
    assert {each.instance for each in later} == {first, second}
    [(_, reason, seen, _)] = model.decisions("scale_in")
    assert reason == "load_below_lower"
    assert seen["low_for_s"] >= seen["start_s"] > sustain_s, "what a start takes was learned"
