"""What gateways believe that instances have in their prefix caches, against what engines find there.

Two prompts in three share 1,024 of about 1,600 tokens, the others nothing. Telemetry names no requests.
"""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch.shadow_state import ShadowInstance
from controller.simulator import Demand, InstanceSettings, LinkSettings
from tests.controller.simulator.runs import simulate

A100 = LatencyCoefficients(0.018962, 1.2565e-4, 2.9551e-9, 0.02455, 8.1592e-8, 8.8767e-5)  # Qwen3-32B, two of them
QUICK = InstanceSettings(A100, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16_384, prefix_caching=True)
SLOW = replace(QUICK, latency=LatencyCoefficients(*(3 * each for each in A100)))
PREFIX = tuple(f"agents/{block}" for block in range(64))
LEARNED_S = 10.0  # requests that are sent later are judged


def demands(rate, models=("model",), end_s=40.0):
    rng, at, found = np.random.default_rng(11), 0.0, []
    while (at := at + float(rng.exponential(1 / rate))) < end_s:
        model, agent = str(rng.choice(models)), rng.random() < 2 / 3
        prompt = max(1100, round(rng.normal(1600, 300))) if agent else int(rng.integers(60, 800))
        kind, targets = ("agents", Targets(3.0, 0.2, None, 60.0)) if agent else ("chat", Targets(3.0, 0.2, None, 60.0))
        prefix = PREFIX if agent else ()
        found.append(Demand(f"r{len(found)}", at, prompt, 40, targets, kind, prefix=prefix, max_tokens=40, model=model))
    return found


FLEETS = {
    "one": ((QUICK,), 6.0, {}),
    "unequal": ((QUICK, SLOW), 8.0, {}),
    "two models": ((replace(QUICK, model="small"), replace(SLOW, model="large")), 4.0, {}),
    "three gateways": ((QUICK, QUICK), 12.0, {"gateways": 3}),
    "disaggregated": (
        (replace(QUICK, role="prefill"), replace(SLOW, role="prefill"), replace(QUICK, role="decode")),
        8.0,
        {"links": LinkSettings(25.0, 0.002)},
    ),
}


@pytest.mark.parametrize("name", FLEETS)
def test_the_share_of_a_prompt_that_is_cached_is_learned_for_each_class(monkeypatch, name):
    instances, rate, settings = FLEETS[name]
    computed: dict[str, int] = {}
    send = ShadowInstance.send

    def noted(self, request, now, *args, **more):
        send(self, request, now, *args, **more)
        if now >= LEARNED_S and self.spec.role != "decode":
            computed[request.id] = self.waiting[request.id].new_tokens

    monkeypatch.setattr(ShadowInstance, "send", noted)
    models = tuple(dict.fromkeys(each.model for each in instances))
    result = simulate(demands(rate, models), instances=instances, **settings)
    for kind, tolerated in (("agents", 0.04), ("chat", 0.3 if settings.get("gateways") else 0.12)):
        served = [each for each in result.records if each.slo_class == kind and each.id in computed]
        assert len(served) > 30
        prompts = sum(each.prompt_tokens for each in served)
        believed = 1 - sum(computed[each.id] for each in served) / prompts
        assert believed == pytest.approx(sum(each.cached_tokens for each in served) / prompts, abs=tolerated), kind
