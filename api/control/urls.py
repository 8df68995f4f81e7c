"""All paths under `/api/v1/`, without trailing slashes."""

from __future__ import annotations

from django.urls import path, re_path, register_converter
from django.urls.converters import PathConverter

from api.control import (
    actions,
    api_keys,
    attainment,
    decisions,
    devices,
    flow_settings,
    health,
    hosts,
    instance_links,
    instances,
    kv_transfers,
    launch_templates,
    links,
    models,
    priority_mappings,
    queue,
    requests,
    scaling_policies,
    simulations,
    slo_classes,
    starts,
    tenants,
    traces,
    transfers,
)
from api.control.unknown import UnknownPath


class AnythingConverter(PathConverter):
    """Line breaks too, which `path` leaves out: such a name is answered as any other invalid name, not with 404."""

    regex = r"(?s:.+)"


register_converter(AnythingConverter, "anything")

urlpatterns = [
    path("tenants", tenants.TenantList.as_view()),
    path("tenants/<int:pk>", tenants.TenantDetail.as_view()),
    path("tenants/by-name/<anything:name>", tenants.TenantByName.as_view()),
    path("api-keys", api_keys.ApiKeyList.as_view()),
    path("api-keys/<int:pk>", api_keys.ApiKeyDetail.as_view()),
    path("api-keys/<int:pk>/revoke", api_keys.ApiKeyRevoke.as_view()),
    path("slo-classes", slo_classes.SLOClassList.as_view()),
    path("slo-classes/<int:pk>", slo_classes.SLOClassDetail.as_view()),
    path("slo-classes/by-name/<anything:name>", slo_classes.SLOClassByName.as_view()),
    path("priority-mappings", priority_mappings.PriorityMappingList.as_view()),
    path("priority-mappings/<int:pk>", priority_mappings.PriorityMappingDetail.as_view()),
    path("priority-mappings/shared", priority_mappings.SharedPriorityMapping.as_view()),
    path("priority-mappings/by-tenant/<anything:tenant>", priority_mappings.PriorityMappingByTenant.as_view()),
    path("flow-settings", flow_settings.FlowSettingsView.as_view()),
    path("models", models.ServedModelList.as_view()),
    path("models/<int:pk>", models.ServedModelDetail.as_view()),
    path("hosts", hosts.HostList.as_view()),
    path("hosts/<int:pk>", hosts.HostDetail.as_view()),
    path("devices", devices.DeviceList.as_view()),
    path("devices/<int:pk>", devices.DeviceDetail.as_view()),
    path("links", links.LinkList.as_view()),
    path("links/<int:pk>", links.LinkDetail.as_view()),
    path("launch-templates", launch_templates.LaunchTemplateList.as_view()),
    path("launch-templates/<int:pk>", launch_templates.LaunchTemplateDetail.as_view()),
    path("launch-templates/<int:pk>/resume", launch_templates.LaunchTemplateResume.as_view()),
    path("launch-templates/by-name/<anything:name>", launch_templates.LaunchTemplateByName.as_view()),
    path("instances", instances.InstanceList.as_view()),
    path("instances/<str:pk>", instances.InstanceDetail.as_view()),
    path("instances/<str:pk>/log", instances.InstanceLog.as_view()),
    path("instances/<str:pk>/drain", instances.InstanceDrain.as_view()),
    path("instances/<str:pk>/stop", instances.InstanceStop.as_view()),
    path("instances/<str:pk>/set-role", instances.InstanceSetRole.as_view()),
    path("instances/<str:pk>/load", instances.InstanceLoad.as_view()),
    path("instances/<str:pk>/sleep", instances.InstanceSleep.as_view()),
    path("instances/<str:pk>/wake", instances.InstanceWake.as_view()),
    path("instances/<str:pk>/desired-state", instances.InstanceDesiredState.as_view()),
    path("actions", actions.ActionList.as_view()),
    path("actions/<int:pk>", actions.ActionDetail.as_view()),
    path("scaling-policies", scaling_policies.ScalingPolicyList.as_view()),
    path("scaling-policies/<int:pk>", scaling_policies.ScalingPolicyDetail.as_view()),
    path("scaling-policies/<int:pk>/hold", scaling_policies.ScalingPolicyHold.as_view()),
    path("scaling-policies/by-model/<anything:model>", scaling_policies.ScalingPolicyByModel.as_view()),
    path("starts", starts.StartsView.as_view()),
    path("decisions", decisions.DecisionList.as_view()),
    path("decisions/<int:pk>", decisions.DecisionDetail.as_view()),
    path("requests", requests.RequestList.as_view()),
    path("requests/<str:pk>", requests.RequestDetail.as_view()),
    path("attainment", attainment.AttainmentView.as_view()),
    path("queue", queue.LiveQueueView.as_view()),
    path("queue/cancel", queue.QueueCancel.as_view()),
    path("queue/reprioritise", queue.QueueReprioritise.as_view()),
    path("queue/pause", queue.QueuePause.as_view()),
    path("queue/resume", queue.QueueResume.as_view()),
    path("simulations", simulations.SimulationList.as_view()),
    path("simulations/<str:pk>", simulations.SimulationDetail.as_view()),
    path("simulations/<str:pk>/cancel", simulations.SimulationCancel.as_view()),
    path("simulations/<str:pk>/result", simulations.SimulationResultView.as_view()),
    path("simulations/<str:pk>/result.csv", simulations.SimulationResultCsv.as_view()),
    path("traces", traces.TraceList.as_view()),
    path("traces/<str:pk>", traces.TraceDetail.as_view()),
    path("transfers", transfers.TransferList.as_view()),
    path("transfers/<int:pk>", transfers.TransferDetail.as_view()),
    path("instance-links", instance_links.InstanceLinkList.as_view()),
    path("instance-links/<int:pk>", instance_links.InstanceLinkDetail.as_view()),
    path("kv-transfers", kv_transfers.KvTransferList.as_view()),
    path("kv-transfers/<int:pk>", kv_transfers.KvTransferDetail.as_view()),
    path("health", health.HealthView.as_view()),
    re_path(r"", UnknownPath.as_view()),
]
