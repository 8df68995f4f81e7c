"""Links between instances, and KV transfers in a partition a day."""

import django.db.models.deletion
from django.db import migrations, models

TRANSFERS = """
CREATE SEQUENCE kv_transfer_id_seq;
CREATE TABLE kv_transfer (
    id bigint NOT NULL DEFAULT nextval('kv_transfer_id_seq'),
    started_at timestamptz NOT NULL,
    request varchar(64) NOT NULL,
    attempt smallint NOT NULL,
    model varchar(120) NOT NULL,
    source varchar(64) NOT NULL,
    target varchar(64) NOT NULL,
    outcome varchar(8) NOT NULL,
    state varchar(16) NOT NULL,
    reason varchar(64) NOT NULL,
    error text NOT NULL,
    bytes bigint,
    layers integer,
    tokens integer,
    cached integer,
    seconds double precision NOT NULL,
    overlap_s double precision,
    measured_by varchar(8) NOT NULL,
    PRIMARY KEY (started_at, id)
) PARTITION BY RANGE (started_at);
ALTER SEQUENCE kv_transfer_id_seq OWNED BY kv_transfer.id;
CREATE INDEX kv_transfer_request ON kv_transfer (request);
CREATE INDEX kv_transfer_source ON kv_transfer (source, started_at);
CREATE INDEX kv_transfer_target ON kv_transfer (target, started_at);
CREATE INDEX kv_transfer_failed ON kv_transfer (started_at) WHERE outcome <> 'done';
"""

# As of request_record: ATTACH locks nobody out. True: it is new.
PARTITION = """
CREATE FUNCTION kv_transfer_partition(day date) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    part text := 'kv_transfer_' || to_char(day, 'YYYYMMDD');
BEGIN
    IF to_regclass(part) IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('kv_transfer_partition'));
    IF to_regclass(part) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE kv_transfer INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part);
    EXECUTE format(
        'ALTER TABLE kv_transfer ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
        part, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'
    );
    RETURN true;
END
$body$;
SELECT kv_transfer_partition((now() AT TIME ZONE 'UTC')::date + ahead) FROM generate_series(-1, 7) AS ahead;
"""


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0010_prefill_instance"),
    ]

    operations = [
        migrations.CreateModel(
            name="InstanceLink",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("source", models.CharField(max_length=64)),
                ("target", models.CharField(max_length=64)),
                ("model", models.CharField(max_length=120)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("connecting", "Connecting"), ("up", "Up"), ("degraded", "Degraded"), ("down", "Down"),
                        ],
                        default="connecting",
                        max_length=16,
                    ),
                ),
                ("since", models.DateTimeField()),
                ("bandwidth_bytes_s", models.FloatField(null=True)),
                ("latency_s", models.FloatField(null=True)),
                ("bytes", models.BigIntegerField(default=0)),
                ("transfers", models.BigIntegerField(default=0)),
                ("failures", models.BigIntegerField(default=0)),
                ("last_error", models.TextField(blank=True)),
                ("error_at", models.DateTimeField(null=True)),
                ("created_at", models.DateTimeField()),
                ("observed_at", models.DateTimeField()),
                ("closed_at", models.DateTimeField(null=True)),
                (
                    "link",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="instance_links",
                        to="controller.link",
                    ),
                ),
            ],
            options={
                "db_table": "instance_link",
                "ordering": ["source", "target", "-id"],
                "indexes": [
                    models.Index(fields=["target", "source"], name="instance_link_target"),
                    models.Index(
                        condition=models.Q(("closed_at__isnull", False)),
                        fields=["closed_at"],
                        name="instance_link_closed",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("closed_at__isnull", True)),
                        fields=("source", "target"),
                        name="instance_link_one_open",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["connecting", "up", "degraded", "down"])),
                        name="instance_link_state_known",
                    ),
                ],
            },
        ),
        migrations.RunSQL(TRANSFERS, "DROP TABLE kv_transfer"),
        migrations.RunSQL(PARTITION, "DROP FUNCTION kv_transfer_partition(date)"),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="KvTransfer",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("started_at", models.DateTimeField()),
                        ("request", models.CharField(max_length=64)),
                        ("attempt", models.PositiveSmallIntegerField()),
                        ("model", models.CharField(max_length=120)),
                        ("source", models.CharField(max_length=64)),
                        ("target", models.CharField(max_length=64)),
                        (
                            "outcome",
                            models.CharField(
                                choices=[("done", "Done"), ("failed", "Failed"), ("undone", "Undone")], max_length=8
                            ),
                        ),
                        (
                            "state",
                            models.CharField(
                                choices=[
                                    ("placed", "Placed"), ("reserved", "Reserved"), ("moving", "Moving"),
                                    ("committed", "Committed"), ("released", "Released"),
                                ],
                                max_length=16,
                            ),
                        ),
                        ("reason", models.CharField(max_length=64)),
                        ("error", models.TextField(blank=True)),
                        ("bytes", models.BigIntegerField(null=True)),
                        ("layers", models.IntegerField(null=True)),
                        ("tokens", models.IntegerField(null=True)),
                        ("cached", models.IntegerField(null=True)),
                        ("seconds", models.FloatField()),
                        ("overlap_s", models.FloatField(null=True)),
                        ("measured_by", models.CharField(max_length=8)),
                    ],
                    options={
                        "db_table": "kv_transfer",
                        "ordering": ["-started_at", "-id"],
                        "indexes": [
                            models.Index(fields=["request"], name="kv_transfer_request"),
                            models.Index(fields=["source", "started_at"], name="kv_transfer_source"),
                            models.Index(fields=["target", "started_at"], name="kv_transfer_target"),
                            models.Index(
                                condition=models.Q(("outcome", "done"), _negated=True),
                                fields=["started_at"],
                                name="kv_transfer_failed",
                            ),
                        ],
                    },
                ),
            ],
        ),
    ]  # fmt: skip
