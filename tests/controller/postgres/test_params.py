"""Connections beside Django's own say what DATABASE_URL says."""

import pytest
from django.db import connection

from controller.postgres.params import server_params
from controller.services.records.requests import records_connection


@pytest.fixture
def told(monkeypatch):
    given = {
        "options": "-c search_path=elsewhere -c statement_timeout=5000",
        "sslmode": "prefer",
        "pool": {"min_size": 1},
    }
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", given)


def test_libpqs_parameters_are_kept_and_djangos_are_not(told):
    params = server_params()
    assert params["sslmode"] == "prefer"
    assert params.keys().isdisjoint({"pool", "cursor_factory", "context", "prepare_threshold"})


@pytest.mark.db
@pytest.mark.django_db
def test_the_writer_of_records_works_in_the_schema_that_the_url_names_without_the_callers_time_out(told):
    with records_connection() as own:
        assert own.execute("SHOW search_path").fetchone() == ("elsewhere",)
        assert own.execute("SHOW statement_timeout").fetchone() == ("0",)
        assert own.info.parameter_status("application_name") == "slackline-records"
