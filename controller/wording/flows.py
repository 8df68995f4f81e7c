"""Flows on shared links in English, for the page Flows."""

from __future__ import annotations

from controller.core.messages import HostFlow
from controller.wording.values import UNSCHEDULED, VALUES

STAGES = {1: "reused KV", 2: "collective", 3: "KV transfer", 4: "weight load"}  # by `controller.flow.flows.FlowStage`
PORTS = {"out": "link to other hosts", "memory": "copies in host memory"}
ENDS = {
    "ended": "sent",
    "expired": "no longer scheduled: no response from its engine",
    "lost": "its engine disconnected",
}


def policy_in_words(policy: str) -> str:
    return VALUES["flow_policy"].get(policy, policy)


def stage_in_words(stage: int) -> str:
    return STAGES.get(stage, f"stage {stage}")


def port_in_words(port: str) -> str:
    return PORTS.get(port, port)


def state_in_words(flow: HostFlow) -> str:
    """What a flow does now, or how it ended."""
    if flow["end"]:
        return ENDS.get(flow["end"], flow["end"])
    if flow["waiting"]:
        return "waiting for data"
    return "sending" if flow["go"] else "held"


def unscheduled_in_words(reason: str) -> str:
    """Why a transfer was not scheduled."""
    return UNSCHEDULED.get(reason, reason)
