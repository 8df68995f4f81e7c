"""Fairness by tenant (Concord, sec. 4.3): shares, CALM's order, and a tenant that asks for four times as much."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.estimates import Estimate, ToldBounds
from controller.core.steps import Added, Chunk, Step, StepRan
from controller.core.types import LatencyCoefficients, Targets
from controller.policies.batching.calm import Calm, CalmConfig
from controller.policies.calm.shares import KEEPS, TenantShares
from controller.simulator import Demand, InstanceSettings
from controller.slo.attainment import token_goodput
from tests.controller.engine.driver import make_seq
from tests.controller.simulator.runs import simulate


def test_whoever_got_more_than_an_equal_share_is_served_later():
    shares = TenantShares()
    for tenant, seconds in (("a", 6.0), ("b", 4.0), ("c", 5.0), ("d", 15.0)):
        shares.use(tenant, seconds)
    assert shares.fair("abcd") == {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}
    assert shares.fair("ac") == pytest.approx({"a": 1 - (1 / 11) / 0.5, "c": 1.0}), "of those that ask now"
    assert shares.fair("de") == {"d": 0.0, "e": 1.0}


def test_one_tenant_alone_has_nothing_to_share():
    shares = TenantShares()
    assert shares.fair("") is None
    assert shares.fair("aaa") is None
    assert shares.fair("ab") == {"a": 1.0, "b": 1.0}


def test_shares_fade_and_tenants_are_forgotten():
    shares = TenantShares()
    shares.use("a", 8.0)
    shares.fade(1)
    shares.use("b", 8.0 * KEEPS)
    assert shares.fair("ab") == {"a": 1.0, "b": 1.0}
    for name in range(5_000):
        shares.use(str(name), 1e-3)
    shares.fade(1_000)
    assert len(shares) == 0


def test_calm_puts_the_tenant_first_that_got_less():
    """With a lower priority of its own, and only where fairness has weight."""
    for weight, first in ((0.0, "busy"), (0.5, "quiet")):
        policy = Calm(CalmConfig(slots=1, frame_steps=1, fair_weight=weight))
        ran = make_seq("r", 50, 50, tenant="x")
        policy.observe(Added(ran), 0.0)
        policy.observe(StepRan(Step(1, (Chunk(ran, 0, 50, True),), (), 0), 1, 0.1), 0.1)
        busy, quiet = make_seq("b", 50, 50, tenant="x"), make_seq("q", 90, 50, tenant="y")
        found = policy.standings([busy, quiet], 0.2)
        assert ("busy" if found.priority[0] > found.priority[1] else "quiet") == first


# ---- a tenant at four times its share (simulated) -------------------------------------------------------------------

OTHERS, BEST_EFFORT = Targets(0.5, 0.03, None, 3600.0), Targets(3600.0, 3600.0, None, 3600.0)
EAGER = Targets(0.01, 0.03, None, 3600.0)
ENGINE = InstanceSettings(
    LatencyCoefficients(0.004, 2e-5, 0.0, 0.008, 0.0, 1e-4),
    kv_tokens=400_000, max_num_seqs=256, max_model_len=2048, prefix_caching=False,
)  # fmt: skip


def demands(tenant, per_s, targets, seed, seconds=20):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / per_s, int(per_s * seconds)))
    return [demand(f"{tenant}{index}", tenant, float(when), targets, rng) for index, when in enumerate(at)]


def demand(name, tenant, at, targets, rng):
    tokens, due = int(rng.integers(50, 150)), at + targets.ttft_s
    end = due + (tokens - 1) * targets.tpot_s
    told = Estimate(
        ToldBounds(tokens // 2, tokens * 3 // 2), 1.0, each_token=True, due=due, latest=end, likely_latest=end
    )
    return Demand(
        name, at, int(rng.integers(50, 200)), tokens, targets, tenant=tenant, max_tokens=2 * tokens,
        estimate=told if targets is not BEST_EFFORT else None,
    )  # fmt: skip


def on_time(eager_per_s, eager, weight, per_s=6.5, others=OTHERS, **options):
    """Tokens on time by tenant, and how many of the requests without targets ended."""
    asked = demands("eager", eager_per_s, eager, 9) + demands("best", 0.5, BEST_EFFORT, 10)
    for seed, tenant in enumerate(("a", "b", "c")):
        asked += demands(tenant, per_s, others, seed)
    asked.sort(key=lambda each: each.at)
    settings = {"slots": 32, "fair_weight": weight, **options}
    engine = replace(ENGINE, batching="calm", batching_settings=settings)
    found, known, ended = dict.fromkeys(("a", "b", "c"), 0), {each.id: each for each in asked}, 0
    for record in simulate(asked, instances=(engine,)).records:
        each, times = known[record.id], record.token_times or ()
        if each.tenant in found:
            found[each.tenant] += token_goodput(times, each.targets.ttft_s, each.targets.tpot_s)
        ended += each.tenant == "best" and len(times) == each.output_tokens
    return found, ended


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"rectangles": True}, marks=pytest.mark.simulated)], ids=["window", "rectangles"]
)
def test_others_keep_their_goodput_beside_a_tenant_at_four_times_its_share(options):
    before, _ = on_time(6.5, OTHERS, 0.0, **options)
    unfair, _ = on_time(26.0, EAGER, 0.0, **options)
    fair, ended = on_time(26.0, EAGER, 0.5, **options)
    assert all(fair[tenant] >= 0.9 * before[tenant] for tenant in before), (before, fair)
    assert sum(unfair.values()) < 0.9 * sum(before.values()), (before, unfair)
    assert ended == 10


def test_others_keep_their_goodput_where_all_together_ask_for_more_than_there_is():
    """1.4 times as much with the eager tenant's usual requests: each then gets an equal share, and keeps that."""
    patient = OTHERS._replace(ttft_s=1.0)
    before, _ = on_time(10.0, patient, 0.5, 10.0, patient)
    unfair, _ = on_time(40.0, EAGER, 0.0, 10.0, patient)
    fair, ended = on_time(40.0, EAGER, 0.5, 10.0, patient)
    assert sum(unfair.values()) < 0.9 * sum(before.values()), (before, unfair)
    assert all(fair[tenant] >= 0.95 * before[tenant] for tenant in before), (before, fair)
    assert ended == 10
