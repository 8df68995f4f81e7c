"""A class that may be served late is served late in a simulation, as it is live; others are refused."""

from __future__ import annotations

from dataclasses import replace

from controller.core.types import Outcome, Targets
from tests.controller.simulator.runs import simulate, some_demands

HASTY = Targets(1e-4, 1.0, None, 3600.0)


def test_what_may_be_late_is_served_and_what_may_not_is_refused():
    demands = some_demands(20, targets=HASTY)
    refused = simulate(demands, "slackline").records
    assert {(record.outcome, record.reason) for record in refused} == {(Outcome.REFUSED, "infeasible_alone")}
    late = simulate([replace(each, may_defer=True) for each in demands], "slackline").records
    assert [record.outcome for record in late] == [Outcome.OK] * 20
    assert not any(record.attained for record in late)
