"""Kairos' choice of decodes inside whole runs: what is kept between steps changes nothing for any request."""

from dataclasses import replace

import pytest

from controller.core.types import Targets
from controller.policies.batching import BATCHINGS
from controller.policies.batching.base import Grant
from controller.policies.batching.filling import fill, prompts
from controller.policies.batching.kairos_decode import KairosDecode
from tests.controller.policies.batching.kairos_oracle import Active, choose
from tests.controller.simulator.runs import SMALL, facts, simulate, some_demands


class Plain(KairosDecode):
    """Alg. 3 again in every step, on what runs then."""

    def compose(self, engine, now):
        decoding = {seq.id: seq for seq in engine.running if seq.decoding}
        actives = [
            Active(
                seq.tokens,
                seq.id,
                seq.first_token_at or 0.0,
                seq.output_tokens - 1,
                seq.tpot_s,
                seq.max_tokens - seq.output_tokens,
            )
            for seq in decoding.values()
        ]
        chosen = choose(actives, self.table, now, self.config.reserve)
        grants = [Grant(decoding[each.id], 1) for each in chosen][: engine.token_budget]
        return grants + fill(engine, prompts(engine), engine.token_budget - len(grants))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_tokens", [1500, 40_000])
def test_a_run_is_that_of_the_plain_algorithm(seed, kv_tokens, monkeypatch):
    monkeypatch.setitem(BATCHINGS._entries, "plain", Plain)
    demands = some_demands(60, rate=40.0, seed=seed, longest=800, targets=Targets(1.0, 0.012, None, 60.0))
    engine = replace(
        SMALL, kv_tokens=kv_tokens, max_num_seqs=24, batching="kairos_decode", batching_settings={"length_bucket": 64}
    )
    runs = [simulate(demands, "round_robin", (replace(engine, batching=name),)) for name in ("kairos_decode", "plain")]
    assert facts(runs[0]) == facts(runs[1])
    assert runs[0].instances[0].preemptions == runs[1].instances[0].preemptions
    assert (runs[0].instances[0].preemptions > 0) == (kv_tokens < 2000)
