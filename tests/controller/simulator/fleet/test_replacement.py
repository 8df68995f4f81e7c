"""The only instance fails: who comes meanwhile waits for its replacement, and is refused at once when none comes."""

from controller.core.types import Outcome
from controller.dispatch import build_dispatcher
from controller.simulator import Demand, Failure, Simulation, SimulationSettings
from tests.controller.simulator.runs import PATIENT, SMALL


def run(failure: Failure, waiting_s: float):
    targets = PATIENT._replace(waiting_time_s=waiting_s)
    demands = [Demand("before", 0.0, 100, 5, PATIENT), Demand("meanwhile", 1.5, 100, 5, targets)]
    settings = SimulationSettings((SMALL,), failures=(failure,))
    result = Simulation(settings, build_dispatcher("slackline"), demands).run()
    return {record.id: record for record in result.records}


def test_it_waits_for_the_replacement():
    record = run(Failure(0, 1.0, 2.0), waiting_s=10.0)["meanwhile"]
    assert record.outcome == Outcome.OK
    assert 1.5 <= record.ttft_s < 2.0  # it is there at 3.0


def test_no_longer_than_it_may():
    record = run(Failure(0, 1.0, 9.0), waiting_s=1.0)["meanwhile"]
    assert record.outcome == Outcome.EXPIRED


def test_it_is_refused_at_once_when_none_comes():
    record = run(Failure(0, 1.0), waiting_s=10.0)["meanwhile"]
    assert (record.outcome, record.reason) == (Outcome.REFUSED, "no_instance")
