import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

FUNCTION = """
CREATE OR REPLACE FUNCTION decision_append_only() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('slackline.retention', true) = 'on'
        AND OLD.actor_type NOT IN ({kept}) AND OLD.at < now() - interval '30 days' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'decisions are append-only: % refused', TG_OP USING ERRCODE = 'restrict_violation';
END
$body$;
"""


class Migration(migrations.Migration):
    """Service accounts with their tokens. Their decisions are kept for ever, as those of people."""

    dependencies = [
        ("controller", "0020_sessions"),
    ]

    operations = [
        migrations.CreateModel(
            name="ServiceAccount",
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
                (
                    "role",
                    models.CharField(
                        choices=[("viewer", "Viewer"), ("operator", "Operator"), ("admin", "Admin")],
                        default="viewer",
                        max_length=16,
                    ),
                ),
                ("scopes", models.JSONField(default=list)),
                (
                    "state",
                    models.CharField(
                        choices=[("active", "Active"), ("suspended", "Suspended")], default="active", max_length=16
                    ),
                ),
            ],
            options={
                "db_table": "service_account",
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="ServiceToken",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("prefix", models.CharField(max_length=16, unique=True)),
                ("sha256", models.CharField(max_length=64, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField()),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "db_table": "service_token",
                "ordering": ["account_id", "-created_at", "-id"],
            },
        ),
        migrations.RemoveConstraint(
            model_name="decision",
            name="decision_actor_known",
        ),
        migrations.AlterField(
            model_name="action",
            name="actor_type",
            field=models.CharField(
                choices=[
                    ("person", "Person"),
                    ("job", "Job"),
                    ("gateway", "Gateway"),
                    ("system", "System"),
                    ("service", "Service account"),
                ],
                max_length=16,
            ),
        ),
        migrations.AlterField(
            model_name="decision",
            name="actor_type",
            field=models.CharField(
                choices=[
                    ("person", "Person"),
                    ("job", "Job"),
                    ("gateway", "Gateway"),
                    ("system", "System"),
                    ("service", "Service account"),
                ],
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="decision",
            constraint=models.CheckConstraint(
                condition=models.Q(("actor_type__in", ["person", "job", "gateway", "system", "service"])),
                name="decision_actor_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="serviceaccount",
            constraint=models.CheckConstraint(
                condition=models.Q(("role__in", ["viewer", "operator", "admin"])), name="service_account_role_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="serviceaccount",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["active", "suspended"])), name="service_account_state_known"
            ),
        ),
        migrations.AddField(
            model_name="servicetoken",
            name="account",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="tokens", to="controller.serviceaccount"
            ),
        ),
        migrations.AddConstraint(
            model_name="servicetoken",
            constraint=models.CheckConstraint(
                condition=models.Q(("sha256__regex", "^[0-9a-f]{64}$")), name="service_token_sha256_hex"
            ),
        ),
        migrations.RunSQL(FUNCTION.format(kept="'person', 'service'"), FUNCTION.format(kept="'person'")),
    ]
