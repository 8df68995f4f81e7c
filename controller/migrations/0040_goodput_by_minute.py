"""Goodput by minute and results of workflows, begun with what arrived in the hour before. Records that gateways of the
version before still write after it are not in them."""

import django.db.models.functions.comparison
from django.db import migrations, models

# Once, for the last hour: from then on gateways add to both tables with each record.
MINUTES = """
INSERT INTO goodput_minute (minute, tenant, slo_class, type, finished, in_time, cancelled, tokens, goodput_tokens)
SELECT minute, tenant, slo_class, type, sum(CASE WHEN gone THEN 0 ELSE stands_for END),
    count(*) FILTER (WHERE attained AND NOT gone), sum(CASE WHEN gone THEN stands_for ELSE 0 END),
    coalesce(sum(CASE WHEN type = 'deadline' THEN prompt_tokens ELSE 0 END + output_tokens)
        FILTER (WHERE outcome = 'ok' AND NOT gone), 0),
    coalesce(sum(goodput_tokens) FILTER (WHERE NOT gone), 0)
FROM (
    SELECT *, date_trunc('minute', arrived_at, 'UTC') AS minute,
        outcome = 'cancelled' OR error_code = 'engine_rejected' AS gone,
        CASE WHEN target_deadline_s IS NOT NULL THEN 'deadline'
            WHEN slo_class = '' AND decisions @> '[{"kind": "slo", "reason": "defaults"}]' THEN 'best_effort'
            ELSE 'latency' END AS type
    FROM request_record WHERE workflow = '' AND arrived_at >= date_trunc('minute', now() - interval '1 hour')
) AS each GROUP BY minute, tenant, slo_class, type
"""
WORKFLOWS = """
INSERT INTO workflow_result (tenant, workflow, slo_class, began_at, ended_at, due_at, cancelled_by, requests, failed,
    missed, cancelled, tokens)
SELECT tenant, workflow, (array_agg(slo_class ORDER BY arrived_at))[1], min(arrived_at), max(ended_at), min(due_at),
    max(cancelled_by), sum(stands_for), coalesce(sum(stands_for) FILTER (WHERE outcome <> 'ok'), 0),
    coalesce(sum(stands_for) FILTER (WHERE NOT gone AND NOT attained), 0),
    coalesce(sum(stands_for) FILTER (WHERE gone), 0),
    coalesce(sum(prompt_tokens + output_tokens) FILTER (WHERE outcome = 'ok'), 0)
FROM (
    SELECT *, outcome = 'cancelled' OR error_code = 'engine_rejected' AS gone,
        arrived_at + coalesce(e2e_s, 0) * interval '1 second' AS ended_at,
        arrived_at + (coalesce((step ->> 'at')::float, 0) + (step -> 'figures' ->> 'left_s')::float)
            * interval '1 second' AS due_at,
        CASE decisions -> -1 ->> 'reason' WHEN 'workflow_cancelled' THEN 'tenant'
            WHEN 'workflow_cancelled_by_operator' THEN 'operator' ELSE '' END AS cancelled_by
    FROM request_record,
        LATERAL (SELECT jsonb_path_query_first(decisions, '$[*] ? (@.kind == "workflow")') AS step) AS found
    WHERE workflow <> '' AND arrived_at >= now() - interval '1 hour'
) AS each GROUP BY tenant, workflow
"""


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0038_retention_of_answers"),
    ]

    operations = [
        migrations.CreateModel(
            name="GoodputMinute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField()),
                ("tenant", models.CharField(max_length=64)),
                ("slo_class", models.CharField(blank=True, max_length=64)),
                ("type", models.CharField(max_length=16)),
                ("finished", models.PositiveIntegerField()),
                ("in_time", models.PositiveIntegerField()),
                ("cancelled", models.PositiveIntegerField()),
                ("tokens", models.BigIntegerField()),
                ("goodput_tokens", models.BigIntegerField()),
            ],
            options={
                "db_table": "goodput_minute",
                "ordering": ["-minute", "tenant", "slo_class", "type"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("minute", "tenant", "slo_class", "type"),
                        include=("finished", "in_time", "cancelled", "tokens", "goodput_tokens"),
                        name="goodput_minute_unique",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="WorkflowResult",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant", models.CharField(max_length=64)),
                ("workflow", models.CharField(max_length=120)),
                ("slo_class", models.CharField(blank=True, max_length=64)),
                ("began_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField()),
                ("due_at", models.DateTimeField(null=True)),
                ("requests", models.PositiveIntegerField()),
                ("failed", models.PositiveIntegerField()),
                ("missed", models.PositiveIntegerField()),
                ("cancelled", models.PositiveIntegerField()),
                ("tokens", models.BigIntegerField()),
                ("cancelled_by", models.CharField(blank=True, max_length=16)),
                ("latest", models.BooleanField(db_default=True, default=True)),
                (
                    "ends_at",
                    models.GeneratedField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(
                                models.Q(("cancelled_by", "")),
                                then=django.db.models.functions.comparison.Coalesce("due_at", "ended_at"),
                            ),
                            default=django.db.models.functions.comparison.Least("due_at", "ended_at"),
                        ),
                        output_field=models.DateTimeField(),
                    ),
                ),
                (
                    "in_time",
                    models.GeneratedField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(
                                models.Q(
                                    ("cancelled_by", ""),
                                    models.Q(
                                        models.Q(
                                            ("cancelled__lt", models.F("requests")),
                                            ("due_at__isnull", True),
                                            ("missed", 0),
                                        ),
                                        models.Q(("ended_at__lte", models.F("due_at")), ("failed", 0)),
                                        _connector="OR",
                                    ),
                                ),
                                then=models.Value(True),
                            ),
                            default=models.Value(False),
                        ),
                        output_field=models.BooleanField(),
                    ),
                ),
                (
                    "excluded",
                    models.GeneratedField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(
                                models.Q(
                                    ("cancelled_by", "tenant"),
                                    models.Q(
                                        ("cancelled_by", ""),
                                        ("cancelled", models.F("requests")),
                                        ("due_at__isnull", True),
                                    ),
                                    _connector="OR",
                                ),
                                then=models.Value(True),
                            ),
                            default=models.Value(False),
                        ),
                        output_field=models.BooleanField(),
                    ),
                ),
            ],
            options={
                "db_table": "workflow_result",
                "ordering": ["-ends_at", "-id"],
                "indexes": [
                    models.Index(
                        fields=["ends_at"],
                        include=("tenant", "slo_class", "in_time", "excluded", "tokens"),
                        name="workflow_result_ends",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("latest", True)),
                        fields=("tenant", "workflow"),
                        name="workflow_result_latest",
                    )
                ],
            },
        ),
        migrations.RunSQL(MINUTES, migrations.RunSQL.noop),
        migrations.RunSQL(WORKFLOWS, migrations.RunSQL.noop),
    ]
