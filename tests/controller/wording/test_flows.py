import re

from controller.flow.flows import FlowStage
from controller.flow.gate import GATED, OFF
from controller.wording.flows import PORTS, STAGES, policy_in_words, unscheduled_in_words
from controller.wording.values import UNSCHEDULED, VALUES
from controller.wording.vocabulary import shown
from workers.flowd.client import Flow
from workers.flowd.daemon import EGRESS


def test_every_stage_port_and_policy_has_words():
    assert set(STAGES) == set(FlowStage)
    assert set(VALUES["flow_policy"]) == {OFF, *GATED}
    assert policy_in_words("newer") == "newer"
    assert set(PORTS) == set(EGRESS.values())


def test_every_reason_why_a_transfer_is_not_scheduled_has_words():
    reasons = str(Flow.__doc__).partition("`level`")[0].partition("`reason`")[2]
    assert set(re.findall(r"`(\w+)`", reasons)) == set(UNSCHEDULED)
    assert shown("flow", "lost") == "unscheduled: the connection to the transfer daemon was lost"
    assert shown("flow", "scheduled") == "scheduled"
    assert unscheduled_in_words("newer") == "newer"
