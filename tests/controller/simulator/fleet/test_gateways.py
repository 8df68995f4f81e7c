"""What several simulated gateways say together, as scalers of the service read it."""

from controller.core import events as ev
from controller.core.types import InstanceSpec, Load
from controller.dispatch import build_scheduler
from controller.simulator.fleet.gateways import GatewayGroup


def test_the_highest_utilisation_counts_whoever_has_the_most_requests_there():
    """One gateway saw a report in which the KV is nearly full, and has nothing there; the other one has not yet."""
    group = GatewayGroup([build_scheduler("slackline"), build_scheduler("slackline")])
    group.handle([ev.InstanceUp(InstanceSpec("e1", "demo", max_num_seqs=8))], 0.0)
    idle, busy = group.schedulers
    idle.handle([ev.Telemetry("e1", Load(observed_at=1.0, kv_usage=0.9))], 1.0)
    busy.handle([ev.Telemetry("e1", Load(observed_at=1.0, running=2))], 1.0)
    (state,) = group.fleet(1.0)
    assert (state.running, state.utilisation) == (2, 0.9)
