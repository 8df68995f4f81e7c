"""Every address of the console: pages, the admin site, the control API, health and metrics."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import include, path, re_path
from django.views.generic.base import RedirectView

from api.control.openapi.document import DocsView, SchemaView
from console.views import audit, experiments, overview, scaling
from console.views.accounts import service_accounts, sessions, sign_in, tenants
from console.views.configuration import changes, classes, mappings, previews
from console.views.fleet import edit, instances, launch_templates, log, new, role
from console.views.site import health, metrics, patterns
from console.views.traffic import flows, goodput, lengths, queue, requests, traces, version_history, workflows

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("overview/history/", overview.overview_history_json, name="overview-history"),
    path("goodput/", goodput.goodput_page, name="goodput"),
    path("queue/", queue.queue, name="queue"),
    path("queue/command/", queue.queue_command, name="queue-command"),
    path("queue/command/all/", queue.queue_command_all, name="queue-command-all"),
    re_path(r"^queue/command/all/(?P<order_id>[0-9a-f]{32})/$", queue.queue_command_ended, name="queue-command-ended"),
    path("requests/", requests.request_list, name="requests"),
    path("workflows/", workflows.workflow_list, name="workflows"),
    path("workflows/one/", workflows.workflow_detail, name="workflow"),
    path("workflows/one/live/", workflows.workflow_live, name="workflow-live"),
    path("workflows/cancel/", workflows.workflow_end, name="workflow-end"),
    path("requests/compare/", requests.request_compare, name="request-compare"),
    path("requests/<str:request_id>/", requests.request_detail, name="request"),
    path("classes/", classes.class_list, name="classes"),
    path("classes/new/", classes.class_new, name="class-new"),
    path("classes/<int:class_id>/", classes.class_edit, name="class-edit"),
    path("classes/<int:class_id>/remove/", classes.class_remove, name="class-remove"),
    path("classes/<int:class_id>/preview/", previews.class_preview, name="class-preview"),
    path("classes/<int:class_id>/history/", changes.class_history, name="class-history"),
    path("mappings/", mappings.mapping_list, name="mappings"),
    path("mappings/<int:mapping_id>/", mappings.mapping_edit, name="mapping-edit"),
    path("mappings/<int:mapping_id>/preview/", previews.mapping_preview, name="mapping-preview"),
    path("mappings/<int:mapping_id>/history/", changes.mapping_history, name="mapping-history"),
    path("previews/<str:slug>/", previews.preview_result, name="preview"),
    path("tenants/", tenants.tenant_list, name="tenants"),
    path("tenants/new/", tenants.tenant_new, name="tenant-new"),
    path("tenants/<int:tenant_id>/", tenants.tenant_detail, name="tenant"),
    path("tenants/<int:tenant_id>/change/", tenants.tenant_edit, name="tenant-edit"),
    path("tenants/<int:tenant_id>/keys/", tenants.key_new, name="key-new"),
    path("service-accounts/", service_accounts.account_list, name="service-accounts"),
    path("service-accounts/new/", service_accounts.account_new, name="service-account-new"),
    path("service-accounts/<int:account_id>/", service_accounts.account_detail, name="service-account"),
    path("service-accounts/<int:account_id>/change/", service_accounts.account_edit, name="service-account-edit"),
    path("service-accounts/<int:account_id>/tokens/", service_accounts.token_new, name="service-token-new"),
    path("service-tokens/<int:token_id>/rotate/", service_accounts.token_rotate, name="service-token-rotate"),
    path("service-tokens/<int:token_id>/revoke/", service_accounts.token_revoke, name="service-token-revoke"),
    path("keys/<int:key_id>/rotate/", tenants.key_rotate, name="key-rotate"),
    path("keys/<int:key_id>/revoke/", tenants.key_revoke, name="key-revoke"),
    path("fleet/", instances.fleet, name="fleet"),
    path("fleet/live/", instances.fleet_live, name="fleet-live"),
    path("fleet/new/", new.instance_new, name="instance-new"),
    path("fleet/start/", new.instance_start, name="instance-start"),
    path("fleet/act/", instances.instance_act, name="instance-act"),
    path("fleet/instances/<path:instance_id>/role/", role.instance_role, name="instance-role"),
    path("fleet/instances/<path:instance_id>/edit/", edit.instance_edit, name="instance-edit"),
    path("fleet/instances/<path:instance_id>/log/", log.instance_log, name="instance-log"),
    path("fleet/instances/<path:instance_id>/log/live/", log.instance_log_live, name="instance-log-live"),
    path("fleet/instances/<path:instance_id>/live/", instances.instance_live, name="instance-live"),
    path("fleet/instances/<path:instance_id>/", instances.instance_detail, name="instance"),
    path("launch-templates/", launch_templates.template_list, name="launch-templates"),
    path("launch-templates/new/", launch_templates.template_new, name="launch-template-new"),
    path("launch-templates/<int:template_id>/", launch_templates.template_edit, name="launch-template-edit"),
    path("launch-templates/<int:template_id>/remove/", launch_templates.template_remove, name="launch-template-remove"),
    path("launch-templates/<int:template_id>/resume/", launch_templates.template_resume, name="launch-template-resume"),
    path("launch-templates/<int:template_id>/history/", changes.template_history, name="launch-template-history"),
    path("flows/", flows.flows_page, name="flows"),
    path("flows/live/<int:page>/", flows.flows_live, name="flows-live"),
    path("flows/settings/", flows.flow_settings_edit, name="flow-settings"),
    path("flows/settings/preview/", previews.flow_settings_preview, name="flow-settings-preview"),
    path("flows/settings/history/", changes.flow_settings_history, name="flow-settings-history"),
    path("scaling/", scaling.scaling_page, name="scaling"),
    path("scaling/live/", scaling.scaling_live, name="scaling-live"),
    path("scaling/new/", scaling.scaling_new, name="scaling-new"),
    path("scaling/<int:policy_id>/hold/", scaling.scaling_hold, name="scaling-hold"),
    path("scaling/<int:policy_id>/release/", scaling.scaling_release, name="scaling-release"),
    path("scaling/<int:policy_id>/", scaling.scaling_edit, name="scaling-edit"),
    path("scaling/<int:policy_id>/history/", changes.scaling_history, name="scaling-history"),
    path("lengths/", lengths.lengths_page, name="lengths"),
    path("lengths/history/", version_history.version_history, name="version-history"),
    path("lengths/graphs/", lengths.pattern_graphs, name="pattern-graphs"),
    path("patterns/", patterns.patterns, name="patterns"),
    path("experiments/", experiments.experiment_list, name="experiments"),
    path("experiments/new/", experiments.experiment_new, name="experiment-new"),
    path("experiments/check/", experiments.experiment_check, name="experiment-check"),
    path("experiments/ask/", experiments.experiment_ask, name="experiment-ask"),
    path("experiments/<str:slug>/", experiments.experiment_detail, name="experiment"),
    path("experiments/<str:slug>/change/", experiments.experiment_change, name="experiment-change"),
    path("experiments/<str:slug>/cancel/", experiments.experiment_stop, name="experiment-cancel"),
    path("experiments/<str:slug>/remove/", experiments.experiment_delete, name="experiment-remove"),
    path("experiments/<str:slug>/csv/", experiments.experiment_file, {"form": "csv"}, name="experiment-csv"),
    path("experiments/<str:slug>/json/", experiments.experiment_file, {"form": "json"}, name="experiment-json"),
    path("traces/", traces.trace_list, name="traces"),
    path("traces/<str:slug>/remove/", traces.trace_delete, name="trace-remove"),
    path("audit/", audit.decision_list, name="audit"),
    path("audit/export/", audit.decision_export, name="audit-export"),
    path("audit/<int:decision_id>/", audit.decision_detail, name="decision"),
    path("login/", sign_in.SignIn.as_view(), name="login"),
    path("session/", sign_in.session, name="session"),
    path("sessions/", sessions.session_list, name="sessions"),
    path("sessions/end/", sessions.session_end, name="session-end"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("admin/login/", sign_in.admin_sign_in),  # before the admin site's own
    path("admin/", admin.site.urls),
    path("api/v1/", include("api.control.urls")),
    path("api/schema", SchemaView.as_view(), name="api-schema"),
    path("api/docs", DocsView.as_view(), name="api-docs"),
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}favicon.svg")),  # asked for by the admin site
    path("healthz", health.healthz, name="healthz"),
    path("metrics", metrics.metrics, name="metrics"),
]

handler400 = "console.views.site.problems.bad_request"
handler403 = "console.views.site.problems.forbidden"
handler404 = "console.views.site.problems.not_found"
handler500 = "console.views.site.problems.defect"
