"""All tables of the control plane but the partitioned one."""

import django.contrib.postgres.fields
import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import controller.models.base


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Host",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "name",
                    models.CharField(
                        max_length=120,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                                "Letters, digits and . _ : / - only, starting with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("zone", models.CharField(blank=True, max_length=64)),
                ("labels", models.JSONField(blank=True, default=dict)),
            ],
            options={
                "db_table": "host",
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="ScalingPolicy",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "role",
                    models.CharField(
                        choices=[("collocated", "Prefill and decode"), ("prefill", "Prefill"), ("decode", "Decode")],
                        default="collocated",
                        max_length=16,
                    ),
                ),
                ("min_instances", models.PositiveIntegerField(default=1)),
                ("max_instances", models.PositiveIntegerField(default=4)),
                ("upper", models.FloatField(default=0.8, verbose_name="scale out above")),
                ("lower", models.FloatField(default=0.3, verbose_name="scale in below")),
                ("sustain_s", models.FloatField(default=15.0, verbose_name="load must stay low for")),
                ("cooldown_s", models.FloatField(default=10.0, verbose_name="pause after an action")),
                ("interval_s", models.FloatField(default=1.0, verbose_name="time between two looks")),
                ("enabled", models.BooleanField(default=True)),
            ],
            options={
                "verbose_name_plural": "scaling policies",
                "db_table": "scaling_policy",
                "ordering": ["model_id", "role"],
            },
        ),
        migrations.CreateModel(
            name="SLOClass",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "name",
                    models.CharField(
                        max_length=64,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                                "Letters, digits and . _ : / - only, starting with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("title", models.CharField(blank=True, max_length=120)),
                (
                    "ttft_s",
                    models.FloatField(
                        validators=[controller.models.base.above_zero], verbose_name="time to first token"
                    ),
                ),
                (
                    "tpot_s",
                    models.FloatField(
                        validators=[controller.models.base.above_zero], verbose_name="time per output token"
                    ),
                ),
                (
                    "deadline_s",
                    models.FloatField(
                        blank=True,
                        null=True,
                        validators=[controller.models.base.above_zero],
                        verbose_name="end-to-end deadline",
                    ),
                ),
                (
                    "waiting_time_s",
                    models.FloatField(
                        default=5.0,
                        validators=[controller.models.base.above_zero],
                        verbose_name="dropped if not scheduled by then",
                    ),
                ),
                (
                    "target",
                    models.FloatField(
                        default=0.95,
                        validators=[controller.models.base.share],
                        verbose_name="share of requests that must make it",
                    ),
                ),
                (
                    "value",
                    models.FloatField(
                        default=1.0,
                        validators=[controller.models.base.above_zero],
                        verbose_name="worth of one request made",
                    ),
                ),
                ("may_defer", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "SLO class",
                "verbose_name_plural": "SLO classes",
                "db_table": "slo_class",
                "ordering": ["ttft_s", "tpot_s", "name"],
            },
        ),
        migrations.CreateModel(
            name="AttainmentMinute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField()),
                ("tenant", models.CharField(max_length=64)),
                ("slo_class", models.CharField(blank=True, max_length=64)),
                ("model", models.CharField(max_length=120)),
                ("finished", models.PositiveIntegerField()),
                ("attained", models.PositiveIntegerField()),
                ("ttft_met", models.PositiveIntegerField()),
                ("tpot_met", models.PositiveIntegerField()),
                ("refused", models.PositiveIntegerField()),
                ("expired", models.PositiveIntegerField()),
                ("failed", models.PositiveIntegerField()),
                ("cancelled", models.PositiveIntegerField()),
                ("prompt_tokens", models.BigIntegerField()),
                ("output_tokens", models.BigIntegerField()),
                ("goodput_tokens", models.BigIntegerField()),
                (
                    "ttft_histogram",
                    django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
                ),
                (
                    "tpot_histogram",
                    django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
                ),
                (
                    "e2e_histogram",
                    django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None),
                ),
            ],
            options={
                "db_table": "attainment_minute",
                "ordering": ["-minute", "tenant", "slo_class", "model"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("minute", "tenant", "slo_class", "model"), name="attainment_minute_unique"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="ConfigVersion",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.BigIntegerField(default=1)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "db_table": "config_version",
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="config_version_one_row")],
            },
        ),
        migrations.CreateModel(
            name="Decision",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField()),
                (
                    "actor_type",
                    models.CharField(
                        choices=[("person", "Person"), ("job", "Job"), ("gateway", "Gateway"), ("system", "System")],
                        max_length=16,
                    ),
                ),
                ("actor", models.CharField(max_length=150)),
                ("kind", models.CharField(max_length=64)),
                ("subject_type", models.CharField(max_length=32)),
                ("subject", models.CharField(max_length=255)),
                ("reason", models.CharField(max_length=255)),
                ("inputs", models.JSONField(default=dict)),
                ("outcome", models.JSONField(default=dict)),
                ("rejected", models.JSONField(default=dict)),
                ("request_id", models.CharField(blank=True, max_length=64)),
                ("idempotency_key", models.CharField(max_length=200, null=True, unique=True)),
            ],
            options={
                "db_table": "decision",
                "ordering": ["-at", "-id"],
                "indexes": [
                    models.Index(fields=["-at", "-id"], name="decision_newest"),
                    models.Index(fields=["kind", "at"], name="decision_kind"),
                    models.Index(fields=["actor", "at"], name="decision_actor"),
                    models.Index(fields=["subject_type", "subject", "at"], name="decision_subject"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("actor_type__in", ["person", "job", "gateway", "system"])),
                        name="decision_actor_known",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Device",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                ("index", models.PositiveSmallIntegerField()),
                ("kind", models.CharField(max_length=64)),
                ("memory_bytes", models.BigIntegerField(validators=[controller.models.base.above_zero])),
                (
                    "host",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="devices", to="controller.host"
                    ),
                ),
            ],
            options={
                "db_table": "device",
                "ordering": ["host_id", "index"],
            },
        ),
        migrations.CreateModel(
            name="Instance",
            fields=[
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "id",
                    models.CharField(
                        max_length=64,
                        primary_key=True,
                        serialize=False,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                                "Letters, digits and . _ : / - only, starting with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("backend", models.CharField(max_length=32)),
                ("provisioner", models.CharField(max_length=32)),
                ("url", models.CharField(blank=True, max_length=255)),
                (
                    "role",
                    models.CharField(
                        choices=[("collocated", "Prefill and decode"), ("prefill", "Prefill"), ("decode", "Decode")],
                        default="collocated",
                        max_length=16,
                    ),
                ),
                ("device_kind", models.CharField(blank=True, max_length=64)),
                ("tp", models.PositiveSmallIntegerField(default=1, validators=[controller.models.base.above_zero])),
                (
                    "max_num_seqs",
                    models.PositiveIntegerField(default=32, validators=[controller.models.base.above_zero]),
                ),
                (
                    "unit_cost",
                    models.FloatField(
                        default=1.0, validators=[controller.models.base.zero_or_more], verbose_name="cost of one second"
                    ),
                ),
                ("spec", models.JSONField(blank=True, default=dict)),
                (
                    "desired_state",
                    models.CharField(
                        choices=[("running", "Running"), ("draining", "Draining"), ("stopped", "Stopped")],
                        default="running",
                        max_length=16,
                    ),
                ),
                (
                    "observed_state",
                    models.CharField(
                        choices=[
                            ("pending", "Pending"),
                            ("starting", "Starting"),
                            ("ready", "Ready"),
                            ("draining", "Draining"),
                            ("unreachable", "Unreachable"),
                            ("failed", "Failed"),
                            ("stopped", "Stopped"),
                        ],
                        default="pending",
                        max_length=16,
                    ),
                ),
                ("generation", models.PositiveIntegerField(default=1)),
                ("observed_generation", models.PositiveIntegerField(default=0)),
                ("desired_at", models.DateTimeField(auto_now_add=True)),
                ("observed_at", models.DateTimeField(blank=True, null=True)),
                ("ready_at", models.DateTimeField(blank=True, null=True)),
                ("stopped_at", models.DateTimeField(blank=True, null=True)),
                ("error", models.TextField(blank=True)),
                (
                    "host",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="instances",
                        to="controller.host",
                    ),
                ),
            ],
            options={
                "db_table": "instance",
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="Action",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("kind", models.CharField(max_length=32)),
                ("params", models.JSONField(blank=True, default=dict)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("pending", "Pending"),
                            ("running", "Running"),
                            ("done", "Done"),
                            ("failed", "Failed"),
                        ],
                        default="pending",
                        max_length=16,
                    ),
                ),
                ("lease_until", models.DateTimeField(blank=True, null=True)),
                ("lease_owner", models.CharField(blank=True, max_length=120)),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("error", models.TextField(blank=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "decision",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="actions",
                        to="controller.decision",
                    ),
                ),
                (
                    "instance",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="actions",
                        to="controller.instance",
                    ),
                ),
            ],
            options={
                "db_table": "action",
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="InstanceDevice",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("held_from", models.DateTimeField(auto_now_add=True)),
                ("released_at", models.DateTimeField(blank=True, null=True)),
                (
                    "device",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="holdings", to="controller.device"
                    ),
                ),
                (
                    "instance",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="holdings", to="controller.instance"
                    ),
                ),
            ],
            options={
                "db_table": "instance_device",
            },
        ),
        migrations.CreateModel(
            name="InstanceInterval",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "role",
                    models.CharField(
                        choices=[("collocated", "Prefill and decode"), ("prefill", "Prefill"), ("decode", "Decode")],
                        max_length=16,
                    ),
                ),
                ("unit_cost", models.FloatField(validators=[controller.models.base.zero_or_more])),
                ("started_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "instance",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="intervals", to="controller.instance"
                    ),
                ),
            ],
            options={
                "db_table": "instance_interval",
                "ordering": ["instance_id", "started_at"],
            },
        ),
        migrations.CreateModel(
            name="Link",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                ("medium", models.CharField(max_length=32)),
                ("bandwidth_bytes_s", models.FloatField(validators=[controller.models.base.above_zero])),
                ("latency_s", models.FloatField(default=0.0, validators=[controller.models.base.zero_or_more])),
                ("state", models.CharField(choices=[("up", "Up"), ("down", "Down")], default="up", max_length=8)),
                (
                    "source",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="links_out", to="controller.host"
                    ),
                ),
                (
                    "target",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="links_in", to="controller.host"
                    ),
                ),
            ],
            options={
                "db_table": "link",
                "ordering": ["source_id", "target_id", "medium"],
            },
        ),
        # A partitioned table, made by the SQL of the next migration; here is what Django knows of it.
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="RequestRecord",
                    fields=[
                        ("id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                        ("arrived_at", models.DateTimeField()),
                        ("tenant", models.CharField(max_length=64)),
                        ("slo_class", models.CharField(blank=True, max_length=64)),
                        ("model", models.CharField(max_length=120)),
                        ("priority", models.IntegerField(null=True)),
                        ("instance", models.CharField(blank=True, max_length=64)),
                        (
                            "outcome",
                            models.CharField(
                                choices=[
                                    ("ok", "ok"),
                                    ("refused", "refused"),
                                    ("expired", "expired"),
                                    ("failed", "failed"),
                                    ("cut", "cut"),
                                    ("cancelled", "cancelled"),
                                ],
                                max_length=16,
                            ),
                        ),
                        ("error_code", models.CharField(blank=True, max_length=64)),
                        ("http_status", models.IntegerField()),
                        ("streamed", models.BooleanField()),
                        ("judged_by", models.CharField(max_length=16)),
                        ("prompt_tokens", models.IntegerField()),
                        ("output_tokens", models.IntegerField()),
                        ("target_ttft_s", models.FloatField()),
                        ("target_tpot_s", models.FloatField()),
                        ("target_deadline_s", models.FloatField(null=True)),
                        ("waiting_time_s", models.FloatField(null=True)),
                        ("queue_s", models.FloatField(null=True)),
                        ("ttft_s", models.FloatField(null=True)),
                        ("tpot_s", models.FloatField(null=True)),
                        ("e2e_s", models.FloatField(null=True)),
                        ("ttft_met", models.BooleanField()),
                        ("tpot_met", models.BooleanField()),
                        ("deadline_met", models.BooleanField()),
                        ("attained", models.BooleanField()),
                        ("goodput_tokens", models.IntegerField()),
                        ("attempts", models.IntegerField()),
                        ("workflow", models.CharField(blank=True, max_length=120)),
                        ("stage", models.CharField(blank=True, max_length=120)),
                        ("decisions", models.JSONField(default=list)),
                        ("token_times", models.JSONField(default=list)),
                    ],
                    options={
                        "db_table": "request_record",
                        "ordering": ["-arrived_at", "-id"],
                        "indexes": [
                            models.Index(fields=["id"], name="request_record_id"),
                            models.Index(fields=["tenant", "arrived_at"], name="request_record_tenant"),
                            models.Index(fields=["slo_class", "arrived_at"], name="request_record_class"),
                            models.Index(
                                condition=models.Q(("attained", False)),
                                fields=["outcome", "arrived_at"],
                                name="request_record_missed",
                            ),
                        ],
                    },
                ),
            ],
        ),
        migrations.CreateModel(
            name="ScalerState",
            fields=[
                (
                    "policy",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="state",
                        serialize=False,
                        to="controller.scalingpolicy",
                    ),
                ),
                ("state", models.JSONField(default=dict)),
                ("tick", models.BigIntegerField(default=0)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "db_table": "scaler_state",
            },
        ),
        migrations.CreateModel(
            name="ServedModel",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "name",
                    models.CharField(
                        max_length=120,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                                "Letters, digits and . _ : / - only, starting with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("aliases", models.JSONField(blank=True, default=list)),
                (
                    "context_tokens",
                    models.PositiveIntegerField(default=4096, validators=[controller.models.base.above_zero]),
                ),
                ("chars_per_token", models.FloatField(default=4.0, validators=[controller.models.base.above_zero])),
                ("tokenizer", models.CharField(blank=True, max_length=255, null=True)),
            ],
            options={
                "db_table": "served_model",
                "ordering": ["name"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("context_tokens__gt", 0)), name="served_model_context_positive"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("chars_per_token__gt", 0)), name="served_model_chars_positive"
                    ),
                ],
            },
        ),
        migrations.AddField(
            model_name="scalingpolicy",
            name="model",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE,
                related_name="scaling_policies",
                to="controller.servedmodel",
            ),
        ),
        migrations.CreateModel(
            name="LatencyProfile",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("device_kind", models.CharField(max_length=64)),
                ("tp", models.PositiveSmallIntegerField(default=1, validators=[controller.models.base.above_zero])),
                (
                    "role",
                    models.CharField(
                        choices=[("collocated", "Prefill and decode"), ("prefill", "Prefill"), ("decode", "Decode")],
                        default="collocated",
                        max_length=16,
                    ),
                ),
                ("coefficients", models.JSONField()),
                ("fit_errors", models.JSONField(blank=True, default=dict)),
                ("samples", models.PositiveIntegerField(default=0)),
                ("source", models.CharField(blank=True, max_length=64)),
                ("fitted_at", models.DateTimeField(auto_now_add=True)),
                ("active", models.BooleanField(default=True)),
                (
                    "model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="latency_profiles",
                        to="controller.servedmodel",
                    ),
                ),
            ],
            options={
                "db_table": "latency_profile",
                "ordering": ["model_id", "device_kind", "tp", "role", "-fitted_at"],
            },
        ),
        migrations.AddField(
            model_name="instance",
            name="model",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="instances", to="controller.servedmodel"
            ),
        ),
        migrations.CreateModel(
            name="Tenant",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "name",
                    models.CharField(
                        max_length=64,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                                "Letters, digits and . _ : / - only, starting with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("title", models.CharField(blank=True, max_length=120)),
                ("weight", models.FloatField(default=1.0, validators=[controller.models.base.above_zero])),
                (
                    "rpm",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[controller.models.base.above_zero],
                        verbose_name="requests a minute",
                    ),
                ),
                (
                    "tpm",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[controller.models.base.above_zero],
                        verbose_name="tokens a minute",
                    ),
                ),
                (
                    "max_concurrency",
                    models.PositiveIntegerField(blank=True, null=True, validators=[controller.models.base.above_zero]),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[("active", "Active"), ("suspended", "Suspended")], default="active", max_length=16
                    ),
                ),
                (
                    "default_class",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="controller.sloclass",
                    ),
                ),
            ],
            options={
                "db_table": "tenant",
                "ordering": ["name"],
            },
        ),
        migrations.AddField(
            model_name="sloclass",
            name="tenant",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="slo_classes",
                to="controller.tenant",
            ),
        ),
        migrations.CreateModel(
            name="PriorityMapping",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                ("levels", models.JSONField()),
                (
                    "window",
                    models.PositiveIntegerField(
                        default=1000,
                        validators=[controller.models.base.above_zero],
                        verbose_name="finished requests looked back on",
                    ),
                ),
                (
                    "window_age_s",
                    models.FloatField(
                        default=300.0,
                        validators=[controller.models.base.above_zero],
                        verbose_name="oldest of them, seconds",
                    ),
                ),
                (
                    "contention",
                    models.CharField(
                        default="relax_to_next_higher", max_length=32, verbose_name="lower bound under contention"
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="priority_mappings",
                        to="controller.tenant",
                    ),
                ),
            ],
            options={
                "db_table": "priority_mapping",
                "ordering": ["tenant_id"],
            },
        ),
        migrations.CreateModel(
            name="ApiKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=64)),
                ("prefix", models.CharField(max_length=16, unique=True)),
                ("sha256", models.CharField(max_length=64, unique=True)),
                ("scopes", models.JSONField(default=list)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, null=True)),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="api_keys", to="controller.tenant"
                    ),
                ),
            ],
            options={
                "db_table": "api_key",
                "ordering": ["tenant_id", "name", "id"],
            },
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.UniqueConstraint(fields=("host", "index"), name="device_unique"),
        ),
        migrations.AddConstraint(
            model_name="device",
            constraint=models.CheckConstraint(
                condition=models.Q(("memory_bytes__gt", 0)), name="device_memory_positive"
            ),
        ),
        migrations.AddIndex(
            model_name="action",
            index=models.Index(
                condition=models.Q(("state__in", ["pending", "running"])),
                fields=["state", "lease_until"],
                name="action_open",
            ),
        ),
        migrations.AddConstraint(
            model_name="action",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["pending", "running", "done", "failed"])), name="action_state_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="instancedevice",
            constraint=models.UniqueConstraint(
                condition=models.Q(("released_at__isnull", True)), fields=("device",), name="instance_device_one_live"
            ),
        ),
        migrations.AddIndex(
            model_name="instanceinterval",
            index=models.Index(fields=["instance", "started_at"], name="instance_interval_from"),
        ),
        migrations.AddConstraint(
            model_name="instanceinterval",
            constraint=models.UniqueConstraint(
                condition=models.Q(("ended_at__isnull", True)), fields=("instance",), name="instance_interval_one_open"
            ),
        ),
        migrations.AddConstraint(
            model_name="instanceinterval",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("ended_at__isnull", True), ("ended_at__gte", models.F("started_at")), _connector="OR"
                ),
                name="instance_interval_in_order",
            ),
        ),
        migrations.AddConstraint(
            model_name="link",
            constraint=models.UniqueConstraint(fields=("source", "target", "medium"), name="link_unique"),
        ),
        migrations.AddConstraint(
            model_name="link",
            constraint=models.CheckConstraint(
                condition=models.Q(("bandwidth_bytes_s__gt", 0)), name="link_bandwidth_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="link",
            constraint=models.CheckConstraint(
                condition=models.Q(("latency_s__gte", 0)), name="link_latency_not_negative"
            ),
        ),
        migrations.AddConstraint(
            model_name="link",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["up", "down"])), name="link_state_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="scalingpolicy",
            constraint=models.UniqueConstraint(fields=("model", "role"), name="scaling_policy_unique"),
        ),
        migrations.AddConstraint(
            model_name="scalingpolicy",
            constraint=models.CheckConstraint(
                condition=models.Q(("max_instances__gte", models.F("min_instances"))), name="scaling_policy_bounds"
            ),
        ),
        migrations.AddConstraint(
            model_name="scalingpolicy",
            constraint=models.CheckConstraint(
                condition=models.Q(("lower__gte", 0), ("upper__gt", models.F("lower"))),
                name="scaling_policy_thresholds",
            ),
        ),
        migrations.AddConstraint(
            model_name="scalingpolicy",
            constraint=models.CheckConstraint(
                condition=models.Q(("sustain_s__gte", 0), ("cooldown_s__gte", 0), ("interval_s__gt", 0)),
                name="scaling_policy_times",
            ),
        ),
        migrations.AddConstraint(
            model_name="latencyprofile",
            constraint=models.UniqueConstraint(
                condition=models.Q(("active", True)),
                fields=("model", "device_kind", "tp", "role"),
                name="latency_profile_one_active",
            ),
        ),
        migrations.AddConstraint(
            model_name="latencyprofile",
            constraint=models.CheckConstraint(condition=models.Q(("tp__gt", 0)), name="latency_profile_tp_positive"),
        ),
        migrations.AddIndex(
            model_name="instance",
            index=models.Index(fields=["desired_state", "observed_state"], name="instance_states"),
        ),
        migrations.AddIndex(
            model_name="instance",
            index=models.Index(fields=["model", "role"], name="instance_model_role"),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.UniqueConstraint(
                condition=models.Q(
                    models.Q(("url", ""), _negated=True),
                    models.Q(("observed_state__in", ["stopped", "failed"]), _negated=True),
                ),
                fields=("url",),
                name="instance_url_unique_while_live",
            ),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(condition=models.Q(("tp__gt", 0)), name="instance_tp_positive"),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(("max_num_seqs__gt", 0)), name="instance_seqs_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(("unit_cost__gte", 0)), name="instance_cost_not_negative"
            ),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(("desired_state__in", ["running", "draining", "stopped"])),
                name="instance_desired_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "observed_state__in",
                        ["pending", "starting", "ready", "draining", "unreachable", "failed", "stopped"],
                    )
                ),
                name="instance_observed_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(condition=models.Q(("weight__gt", 0)), name="tenant_weight_positive"),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("rpm__gt", 0), ("rpm__isnull", True), _connector="OR"), name="tenant_rpm_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("tpm__gt", 0), ("tpm__isnull", True), _connector="OR"), name="tenant_tpm_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("max_concurrency__gt", 0), ("max_concurrency__isnull", True), _connector="OR"),
                name="tenant_max_concurrency_positive",
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["active", "suspended"])), name="tenant_state_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.UniqueConstraint(
                fields=("tenant", "name"), name="slo_class_unique", nulls_distinct=False
            ),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(condition=models.Q(("ttft_s__gt", 0)), name="slo_class_ttft_positive"),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(condition=models.Q(("tpot_s__gt", 0)), name="slo_class_tpot_positive"),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(
                condition=models.Q(("deadline_s__gt", 0), ("deadline_s__isnull", True), _connector="OR"),
                name="slo_class_deadline_positive",
            ),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(
                condition=models.Q(("waiting_time_s__gt", 0)), name="slo_class_waiting_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(condition=models.Q(("value__gt", 0)), name="slo_class_value_positive"),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(
                condition=models.Q(("target__gt", 0), ("target__lte", 1)), name="slo_class_target_is_share"
            ),
        ),
        migrations.AddConstraint(
            model_name="sloclass",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("deadline_s__isnull", True), ("deadline_s__gte", models.F("ttft_s")), _connector="OR"
                ),
                name="slo_class_deadline_after_ttft",
            ),
        ),
        migrations.AddConstraint(
            model_name="prioritymapping",
            constraint=models.UniqueConstraint(
                fields=("tenant",), name="priority_mapping_unique", nulls_distinct=False
            ),
        ),
        migrations.AddConstraint(
            model_name="prioritymapping",
            constraint=models.CheckConstraint(
                condition=models.Q(("window__gt", 0)), name="priority_mapping_window_positive"
            ),
        ),
        migrations.AddConstraint(
            model_name="prioritymapping",
            constraint=models.CheckConstraint(
                condition=models.Q(("window_age_s__gt", 0)), name="priority_mapping_age_positive"
            ),
        ),
        migrations.AddIndex(
            model_name="apikey",
            index=models.Index(
                condition=models.Q(("revoked_at__isnull", True)), fields=["tenant"], name="api_key_live"
            ),
        ),
        migrations.AddConstraint(
            model_name="apikey",
            constraint=models.CheckConstraint(
                condition=models.Q(("sha256__regex", "^[0-9a-f]{64}$")), name="api_key_sha256_hex"
            ),
        ),
    ]
