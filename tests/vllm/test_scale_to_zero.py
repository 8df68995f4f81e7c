"""A real vLLM that the scaler stops when nobody needs it, and starts again for the first request that waits for it."""

from __future__ import annotations

import threading
import time

import pytest
import requests

from tests.vllm.launched import START_S

pytestmark = [pytest.mark.vllm, pytest.mark.db]


def test_the_first_request_after_a_scale_to_zero_waits_for_a_vllm_and_is_served_by_it(launched, figures):
    model = launched("zero", 4)
    system = model.system
    first = model.start_first()
    model.scale(min_instances=0, max_instances=1, sustain_s=1.0)
    system.until(lambda: model.instances("stopped") == {first: "stopped"}, START_S)  # after as long as a start takes
    [(_, reason, seen, _)] = model.decisions("scale_in")
    assert (reason, seen["min_instances"], seen["instance"]) == ("load_below_lower", 0, first)
    assert model.instances() == {}, "nothing is started without a request"
    answers: list[requests.Response] = []
    body = {
        "model": model.model, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "waiting_time": START_S,
        "target_ttft": START_S,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {system.key()}"}

    def ask(waiting_time: float) -> requests.Response:
        sent = {**body, "waiting_time": waiting_time}
        return requests.post(f"{system.gateway}/v1/completions", json=sent, headers=headers, timeout=START_S + 60)

    waits = threading.Thread(target=lambda: answers.append(ask(START_S)))
    began = time.monotonic()
    waits.start()
    system.until(lambda: model.decisions("scale_out"), 30.0)
    [(_, reason, seen, outcome)] = model.decisions("scale_out")
    assert (reason, seen["ready"], seen["queued"]) == ("load_above_upper", 0, 1)
    assert seen["start_s"] > 0, "what a start takes was learned"
    [second] = outcome["started"]
    short = ask(1.0)  # may not wait as long
    assert (short.status_code, short.json()["error"]["code"]) == (504, "waiting_time_exceeded")
    assert "an instance was still starting" in short.json()["error"]["message"]
    waits.join(START_S + 90)
    waited_s = time.monotonic() - began
    [answer] = answers
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4), answer.text
    assert answer.headers["x-slackline-instance"] == second != first
    system.until(lambda: model.decisions("scale_out_served"), 20.0)
    figures["from_zero_s"] = {**model.scale_out_s(second), "answer": round(waited_s, 2)}
    assert model.instances() == {second: "ready"}, "one is enough"
