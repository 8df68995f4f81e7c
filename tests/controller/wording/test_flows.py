from controller.flow.flows import FlowStage
from controller.flow.gate import GATED, OFF
from controller.wording.flows import PORTS, STAGES, policy_in_words
from controller.wording.values import VALUES
from workers.flowd.daemon import EGRESS


def test_every_stage_port_and_policy_has_words():
    assert set(STAGES) == set(FlowStage)
    assert set(VALUES["flow_policy"]) == {OFF, *GATED}
    assert policy_in_words("newer") == "newer"
    assert set(PORTS) == set(EGRESS.values())
