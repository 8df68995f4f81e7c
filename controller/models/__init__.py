"""Tables of the control plane, one family in each file. Services write them, selectors read them."""

from controller.models.actions import Action, Transfer
from controller.models.config import ConfigVersion
from controller.models.decisions import Decision
from controller.models.experiments import Experiment, ExperimentRun, Trace
from controller.models.fleet import (
    Device,
    Host,
    Instance,
    InstanceDevice,
    InstanceInterval,
    LatencyProfile,
    LaunchTemplate,
    Link,
    ProvisionerLook,
    ServedModel,
)
from controller.models.flows import FlowSettings
from controller.models.graph_versions import GraphVersion
from controller.models.length_versions import LengthVersion
from controller.models.links import InstanceLink, KvTransfer
from controller.models.records import AttainmentMinute, GoodputMinute, RequestRecord, WorkflowResult
from controller.models.scaling import ScalerState, ScalingPolicy, ScalingSample
from controller.models.service_accounts import ServiceAccount, ServiceToken
from controller.models.sessions import PersonSession
from controller.models.slo import PriorityMapping, SLOClass
from controller.models.takeovers import LearnedTakeover
from controller.models.tenants import ApiKey, Tenant

__all__ = [
    "Action",
    "ApiKey",
    "AttainmentMinute",
    "ConfigVersion",
    "Decision",
    "Device",
    "Experiment",
    "ExperimentRun",
    "FlowSettings",
    "GoodputMinute",
    "GraphVersion",
    "Host",
    "Instance",
    "InstanceDevice",
    "InstanceInterval",
    "InstanceLink",
    "KvTransfer",
    "LatencyProfile",
    "LaunchTemplate",
    "LearnedTakeover",
    "LengthVersion",
    "Link",
    "PersonSession",
    "PriorityMapping",
    "ProvisionerLook",
    "RequestRecord",
    "SLOClass",
    "ScalerState",
    "ScalingPolicy",
    "ScalingSample",
    "ServedModel",
    "ServiceAccount",
    "ServiceToken",
    "Tenant",
    "Trace",
    "Transfer",
    "WorkflowResult",
]
