"""Every address under `/api/v1/`. No trailing slashes."""

from __future__ import annotations

from django.urls import path, re_path

from api.control import (
    api_keys,
    attainment,
    decisions,
    devices,
    health,
    hosts,
    instances,
    links,
    models,
    priority_mappings,
    queue,
    requests,
    scaling_policies,
    slo_classes,
    tenants,
)
from api.control.unknown import UnknownAddress

urlpatterns = [
    path("tenants", tenants.TenantList.as_view()),
    path("tenants/<int:pk>", tenants.TenantDetail.as_view()),
    path("api-keys", api_keys.ApiKeyList.as_view()),
    path("api-keys/<int:pk>", api_keys.ApiKeyDetail.as_view()),
    path("api-keys/<int:pk>/revoke", api_keys.ApiKeyRevoke.as_view()),
    path("slo-classes", slo_classes.SLOClassList.as_view()),
    path("slo-classes/<int:pk>", slo_classes.SLOClassDetail.as_view()),
    path("priority-mappings", priority_mappings.PriorityMappingList.as_view()),
    path("priority-mappings/<int:pk>", priority_mappings.PriorityMappingDetail.as_view()),
    path("models", models.ServedModelList.as_view()),
    path("models/<int:pk>", models.ServedModelDetail.as_view()),
    path("hosts", hosts.HostList.as_view()),
    path("hosts/<int:pk>", hosts.HostDetail.as_view()),
    path("devices", devices.DeviceList.as_view()),
    path("devices/<int:pk>", devices.DeviceDetail.as_view()),
    path("links", links.LinkList.as_view()),
    path("links/<int:pk>", links.LinkDetail.as_view()),
    path("instances", instances.InstanceList.as_view()),
    path("instances/<str:pk>", instances.InstanceDetail.as_view()),
    path("instances/<str:pk>/drain", instances.InstanceDrain.as_view()),
    path("instances/<str:pk>/stop", instances.InstanceStop.as_view()),
    path("instances/<str:pk>/desired-state", instances.InstanceDesiredState.as_view()),
    path("scaling-policies", scaling_policies.ScalingPolicyList.as_view()),
    path("scaling-policies/<int:pk>", scaling_policies.ScalingPolicyDetail.as_view()),
    path("decisions", decisions.DecisionList.as_view()),
    path("decisions/<int:pk>", decisions.DecisionDetail.as_view()),
    path("requests", requests.RequestList.as_view()),
    path("requests/<str:pk>", requests.RequestDetail.as_view()),
    path("attainment", attainment.AttainmentView.as_view()),
    path("queue", queue.QueueView.as_view()),
    path("queue/cancel", queue.QueueCancel.as_view()),
    path("queue/reprioritise", queue.QueueReprioritise.as_view()),
    path("queue/pause", queue.QueuePause.as_view()),
    path("queue/resume", queue.QueueResume.as_view()),
    path("health", health.HealthView.as_view()),
    re_path(r"", UnknownAddress.as_view()),
]
