#!/bin/sh
# Creates the database users of the processes, once, when PostgreSQL starts with an empty volume. None is a superuser.
# slackline_owner owns the database: it migrates and runs management commands. What the others may do with each table
# is granted after the migration (controller/postgres/grants.py). Run again by hand, it only sets the passwords.
set -eu

psql --no-psqlrc --quiet --set=ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv database POSTGRES_DB
\getenv owner_password OWNER_DB_PASSWORD
\getenv gateway_password GATEWAY_DB_PASSWORD
\getenv console_password CONSOLE_DB_PASSWORD
\getenv worker_password WORKER_DB_PASSWORD
SELECT format('CREATE ROLE %I NOSUPERUSER NOCREATEDB NOCREATEROLE', name)
FROM unnest(ARRAY['slackline_owner', 'slackline_gateway', 'slackline_console', 'slackline_worker', 'slackline_records'])
    AS name
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)
\gexec
ALTER ROLE slackline_owner LOGIN PASSWORD :'owner_password';
ALTER ROLE slackline_gateway LOGIN PASSWORD :'gateway_password' CONNECTION LIMIT 40;
ALTER ROLE slackline_console LOGIN PASSWORD :'console_password' CONNECTION LIMIT 40;
ALTER ROLE slackline_worker LOGIN PASSWORD :'worker_password' CONNECTION LIMIT 40;
GRANT slackline_records TO slackline_owner;
ALTER DATABASE :"database" OWNER TO slackline_owner;
REVOKE ALL ON DATABASE :"database" FROM PUBLIC;
GRANT CONNECT, TEMPORARY ON DATABASE :"database" TO slackline_gateway, slackline_console, slackline_worker;
SQL
