"""Pruning in simulated runs: orders reach every gateway, and every request still counts."""

from dataclasses import replace

import pytest

from benchmarks.bench_prune import outcome, plan, pruned, run
from benchmarks.fleets.cells import cell, instances
from controller.core.errors import ConfigError
from controller.simulator.experiment import parse_experiment
from controller.simulator.report.summary import attainment, report
from controller.simulator.settings import PruningSettings

OVERLOAD = 180.0  # requests/s, 1.7 times what the fleet serves


def overloaded(budget):
    return run(plan(2, 3.0, (1000,), budget), "slackline", OVERLOAD)


@pytest.fixture(scope="module")
def results():
    return {budget: overloaded(budget)[0] for budget in (None, 0.5)}


def test_pruned_requests_count_and_some_make_it(results):
    off, on = results[None], results[0.5]
    assert {record.id for record in on.records} == {record.id for record in off.records}
    counts = pruned([on])
    assert 0 < counts["pruned_made_it"] < counts["pruned"]
    assert pruned([off]) == {"pruned": 0, "pruned_made_it": 0}


def test_attainment_under_overload_is_not_worse(results):
    assert attainment(results[0.5].records) >= 0.98 * attainment(results[None].records)


def test_a_budget_of_nothing_changes_nothing(results):
    assert not overloaded(0.0)[0].pruned


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"drop_budget": 2}, "drop_budget"), ({"every_s": 0.0}, "every_s"), ({"delay_s": -1.0}, "delay_s")],
)
def test_bad_settings_name_their_field(changes, field):
    with pytest.raises(ConfigError) as error:
        PruningSettings(**{"drop_budget": 0.1, **changes})
    assert error.value.field == field


# ---- links ---------------------------------------------------------------------------------------------------------


def over_a_slow_link(budget, gateways=2, rate=12.0, seeds=(1037,), **links):
    """Long prompts, whose KV is more than the link of the prefill instance can carry. A result for each seed."""
    experiment = plan(gateways, 10.0, seeds, budget, "slow_link", long_prompts=True)
    settings = replace(experiment.settings, links=replace(experiment.settings.links, **links))
    return run(replace(experiment, settings=settings), "slackline", rate)


@pytest.mark.parametrize("gateways", [1, 2])
def test_requests_whose_kv_the_link_cannot_carry_are_pruned(gateways):
    """With one gateway too: its dispatcher does not count the link. A single seed of ten seconds may lose 4 %."""
    off, on = (over_a_slow_link(budget, gateways, seeds=(1000, 1037, 1074, 1111)) for budget in (None, 0.5))
    for with_it, without in zip(on, off, strict=True):
        assert {record.id for record in with_it.records} == {record.id for record in without.records}
    counts = pruned(on)
    assert 0 < counts["pruned_made_it"] < counts["pruned"]
    assert outcome(on) >= 0.98 * outcome(off)


def test_where_no_daemon_orders_transfers_links_are_not_counted():
    (found,) = over_a_slow_link(0.5, gateways=1, flow_policy="off")
    assert not found.pruned


def test_a_link_that_carries_it_all_prunes_nobody():
    (found,) = over_a_slow_link(0.5, rate=3.0, bandwidth_gb_s=25.0)
    assert not found.pruned


def test_a_report_counts_them(results):
    found = {budget: report(each)["pruned"] for budget, each in results.items()}
    assert found[None] == {"requests": 0, "attained": 0}
    assert found[0.5] == {"requests": len(results[0.5].pruned), "attained": pruned([results[0.5]])["pruned_made_it"]}


def test_a_contender_may_prune_otherwise_than_the_rest():
    policies = ["slackline", {"name": "slackline", "label": "half", "pruning": {"drop_budget": 0.5}}]
    config = cell("two gateways", instances(), gateways=2, pruning={"drop_budget": 0.2}) | {"policies": policies}
    found = parse_experiment(config, lambda name: {}, lambda name: [])
    budgets = [each.settings(found.settings).pruning for each in found.contenders]
    assert budgets == [PruningSettings(0.2), PruningSettings(0.5)]
    config["policies"][1] = {"name": "slackline", "pruning": {"drop_budget": 2}}
    with pytest.raises(ConfigError, match="drop_budget"):
        parse_experiment(config, lambda name: {}, lambda name: [])


def test_an_experiment_names_them():
    config = cell("two gateways", instances(), gateways=2, pruning={"drop_budget": 0.2, "delay_s": 0.1})
    found = parse_experiment(config, lambda name: {}, lambda name: [])
    assert found.settings.pruning == PruningSettings(0.2, delay_s=0.1)
