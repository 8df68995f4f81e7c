"""What Django's operations cannot say: the partitioned table, the append-only trigger, the one row, the three roles."""

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

RECORDS = """
CREATE TABLE request_record (
    id varchar(64) NOT NULL,
    arrived_at timestamptz NOT NULL,
    tenant varchar(64) NOT NULL,
    slo_class varchar(64) NOT NULL,
    model varchar(120) NOT NULL,
    priority integer,
    instance varchar(64) NOT NULL,
    outcome varchar(16) NOT NULL,
    error_code varchar(64) NOT NULL,
    http_status integer NOT NULL,
    streamed boolean NOT NULL,
    judged_by varchar(16) NOT NULL,
    prompt_tokens integer NOT NULL,
    output_tokens integer NOT NULL,
    target_ttft_s double precision NOT NULL,
    target_tpot_s double precision NOT NULL,
    target_deadline_s double precision,
    waiting_time_s double precision,
    queue_s double precision,
    ttft_s double precision,
    tpot_s double precision,
    e2e_s double precision,
    ttft_met boolean NOT NULL,
    tpot_met boolean NOT NULL,
    deadline_met boolean NOT NULL,
    attained boolean NOT NULL,
    goodput_tokens integer NOT NULL,
    attempts integer NOT NULL,
    workflow varchar(120) NOT NULL,
    stage varchar(120) NOT NULL,
    decisions jsonb NOT NULL,
    token_times jsonb NOT NULL,
    PRIMARY KEY (arrived_at, id)
) PARTITION BY RANGE (arrived_at);
CREATE INDEX request_record_id ON request_record (id);
CREATE INDEX request_record_tenant ON request_record (tenant, arrived_at);
CREATE INDEX request_record_class ON request_record (slo_class, arrived_at);
CREATE INDEX request_record_missed ON request_record (outcome, arrived_at) WHERE NOT attained;
"""

# CREATE TABLE ... PARTITION OF would lock out readers and writers of the whole table; ATTACH does not. True: it is new.
PARTITION = """
CREATE FUNCTION request_record_partition(day date) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    part text := 'request_record_' || to_char(day, 'YYYYMMDD');
BEGIN
    IF to_regclass(part) IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('request_record_partition'));
    IF to_regclass(part) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE request_record INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part);
    EXECUTE format(
        'ALTER TABLE request_record ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
        part, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'
    );
    RETURN true;
END
$body$;
SELECT request_record_partition((now() AT TIME ZONE 'UTC')::date + ahead) FROM generate_series(-1, 7) AS ahead;
"""

APPEND_ONLY = """
CREATE FUNCTION decision_append_only() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    RAISE EXCEPTION 'decisions are append-only: % refused', TG_OP USING ERRCODE = 'restrict_violation';
END
$body$;
CREATE TRIGGER decision_append_only BEFORE UPDATE OR DELETE ON decision
    FOR EACH ROW EXECUTE FUNCTION decision_append_only();
"""

ROLES = ("admin", "operator", "viewer")


def create_roles(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    group = apps.get_model("auth", "Group")
    for name in ROLES:
        group.objects.get_or_create(name=name)


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    operations = [
        migrations.RunSQL(RECORDS, "DROP TABLE request_record"),
        migrations.RunSQL(PARTITION, "DROP FUNCTION request_record_partition(date)"),
        migrations.RunSQL(
            APPEND_ONLY, "DROP TRIGGER decision_append_only ON decision; DROP FUNCTION decision_append_only()"
        ),
        migrations.RunSQL(
            "INSERT INTO config_version (id, version, updated_at) VALUES (1, 1, now())", migrations.RunSQL.noop
        ),
        migrations.RunPython(create_roles, migrations.RunPython.noop),
    ]
