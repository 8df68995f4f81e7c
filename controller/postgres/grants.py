"""What each process may do with each table, where processes have database users of their own.

`docker/postgres/roles.sh` creates the users, the owner of the tables runs `manage.py grant_database_roles` after each
migration. A table without an entry is reachable by its owner alone, and tests/controller/postgres/test_grants.py fails.

Day partitions of records are created and dropped by functions that run as `slackline_records`, the owner of both
partitioned tables and of nothing else. No process is a member of it: who may create objects in the schema could put a
function of theirs in the way of the owner's.
"""

from __future__ import annotations

from typing import Any

from psycopg import sql

GATEWAY, CONSOLE, WORKER = "slackline_gateway", "slackline_console", "slackline_worker"
USERS = (GATEWAY, CONSOLE, WORKER)
RECORDS = "slackline_records"

_READ = "SELECT"
_ADD = "SELECT, INSERT"
_ALL = "SELECT, INSERT, UPDATE, DELETE"

_PEOPLE = {CONSOLE: _ALL}
_NAMES = {CONSOLE: _READ}
_CONFIGURATION = {GATEWAY: _READ, CONSOLE: _ALL, WORKER: _READ}
_FLEET = {GATEWAY: _READ, CONSOLE: _ALL, WORKER: _ALL}
_WORK = {CONSOLE: _ALL, WORKER: _ALL}

# By table and user. `UPDATE (column)` is for one column.
GRANTS: dict[str, dict[str, str]] = {
    "auth_user": _PEOPLE,
    "auth_user_groups": _PEOPLE,
    "auth_user_user_permissions": _PEOPLE,
    "auth_group": _PEOPLE,
    "auth_group_permissions": _PEOPLE,
    "auth_permission": _NAMES,
    "django_content_type": _NAMES,
    "person_session": _PEOPLE,
    "service_account": _PEOPLE,
    "service_token": _PEOPLE,
    "django_admin_log": _PEOPLE,
    "django_migrations": {GATEWAY: _READ, CONSOLE: _READ, WORKER: _READ},
    "config_version": {GATEWAY: _READ, CONSOLE: "SELECT, INSERT, UPDATE", WORKER: "SELECT, INSERT, UPDATE"},
    "tenant": _CONFIGURATION,
    "api_key": {GATEWAY: "SELECT, UPDATE (last_used_at)", CONSOLE: _ALL},
    "slo_class": _CONFIGURATION,
    "priority_mapping": _CONFIGURATION,
    "flow_settings": _CONFIGURATION,
    "served_model": _CONFIGURATION,
    "host": _CONFIGURATION,
    "device": _CONFIGURATION,
    "link": _CONFIGURATION,
    "latency_profile": _FLEET,
    "instance": _FLEET,
    "instance_device": _FLEET,
    "instance_interval": _FLEET,
    "instance_link": _FLEET,
    # Gateways need to know for which models an instance is started on demand, and nothing else of these two.
    "launch_template": {GATEWAY: "SELECT (id, paused_at)", CONSOLE: _ALL, WORKER: "SELECT, UPDATE"},
    "provisioner_look": {CONSOLE: _READ, WORKER: _ALL},
    "action": _FLEET,
    "transfer": _FLEET,
    "scaling_policy": {GATEWAY: "SELECT (id, model_id, role, enabled)", CONSOLE: _ALL, WORKER: "SELECT, UPDATE"},
    "scaler_state": _WORK,
    "scaling_sample": _WORK,
    "trace": _WORK,
    "experiment": _WORK,
    "experiment_run": _WORK,
    "length_version": {GATEWAY: _READ, CONSOLE: _READ, WORKER: _ALL},
    "graph_version": {GATEWAY: _READ, CONSOLE: _READ, WORKER: _ALL},
    "learned_takeover": {GATEWAY: "SELECT, INSERT, UPDATE", CONSOLE: _READ, WORKER: "SELECT, DELETE"},
    # The audit: added by all, deleted by the retention alone, and a trigger refuses the rest. It names people and the
    # addresses of their sign-ins, which are nothing for a gateway; it gets the ids of what it adds.
    "decision": {GATEWAY: "SELECT (id), INSERT", CONSOLE: _ADD, WORKER: "SELECT, INSERT, DELETE"},
    "request_record": {GATEWAY: _ADD, CONSOLE: _READ, WORKER: _READ},
    "kv_transfer": {GATEWAY: _ADD, CONSOLE: _READ, WORKER: _READ},
    "attainment_minute": {GATEWAY: "SELECT, INSERT, UPDATE", CONSOLE: _READ, WORKER: "SELECT, DELETE"},
    "goodput_minute": {GATEWAY: "SELECT, INSERT, UPDATE", CONSOLE: _READ, WORKER: "SELECT, DELETE"},
    # The console adds that an operator cancelled one.
    "workflow_result": {
        GATEWAY: "SELECT, INSERT, UPDATE",
        CONSOLE: "SELECT, INSERT, UPDATE",
        WORKER: "SELECT, DELETE",
    },
}
_PARTITIONED = ("request_record", "kv_transfer")
DROP = "record_partition_drop(text, date)"
_DROP = """
CREATE OR REPLACE FUNCTION record_partition_drop(parent text, day date) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF parent NOT IN ('request_record', 'kv_transfer') OR day >= current_date THEN
        RAISE EXCEPTION 'no old partition of records: % of %', parent, day USING ERRCODE = 'invalid_parameter_value';
    END IF;
    EXECUTE format('DROP TABLE %I', parent || '_' || to_char(day, 'YYYYMMDD'));
END
$body$
"""


def grant(cursor: Any) -> bool:
    """Give each user what GRANTS says and take the rest, in the transaction of the cursor. False without the users.

    Errors: psycopg's, if the caller does not own the tables.
    """
    cursor.execute("SELECT count(*) FROM pg_roles WHERE rolname = ANY(%s)", [[*USERS, RECORDS]])
    if cursor.fetchone()[0] < len(USERS) + 1:
        return False
    users = sql.SQL(", ").join(map(sql.Identifier, USERS))
    cursor.execute(sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC, {}").format(users))
    cursor.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(users))
    cursor.execute(sql.SQL("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {}").format(users))
    _own_records(cursor)
    cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    present = {name for (name,) in cursor.fetchall()}
    for table, rights in GRANTS.items():
        for user, right in rights.items() if table in present else ():
            cursor.execute(
                sql.SQL("GRANT {} ON {} TO {}").format(sql.SQL(right), sql.Identifier(table), sql.Identifier(user))
            )
    return True


def _own_records(cursor: Any) -> None:
    """Hand the partitioned tables and the functions that create and drop their partitions to RECORDS."""
    owner = sql.Identifier(RECORDS)
    cursor.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA public TO {}").format(owner))
    for table in _PARTITIONED:
        cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [table])
        for name in (table, *(part for (part,) in cursor.fetchall())):
            cursor.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(sql.Identifier(name), owner))
        _hand_over(cursor, f"{table}_partition(date)", owner, (GATEWAY, WORKER))
    cursor.execute("SELECT to_regprocedure(%s)", [DROP])
    if cursor.fetchone() == (None,):
        cursor.execute(_DROP)
    _hand_over(cursor, DROP, owner, (WORKER,))


def _hand_over(cursor: Any, function: str, owner: sql.Identifier, callers: tuple[str, ...]) -> None:
    """The function runs as `owner`, whoever of `callers` calls it; nobody else may."""
    named, names = sql.SQL(function), sql.SQL(", ").join(map(sql.Identifier, callers))
    cursor.execute(sql.SQL("ALTER FUNCTION {} SECURITY DEFINER SET search_path = public, pg_temp").format(named))
    cursor.execute(sql.SQL("REVOKE ALL ON FUNCTION {} FROM PUBLIC").format(named))
    cursor.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(named, names))
    cursor.execute(sql.SQL("ALTER FUNCTION {} OWNER TO {}").format(named, owner))
