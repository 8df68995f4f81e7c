"""Servers named by environment: refused in one line when they do not answer, without their password."""

import pytest

from controller.core.errors import ConfigError
from workers.supervisor.external_servers import require_database, require_redis
from workers.supervisor.ports import free_port


def test_a_database_that_does_not_answer_is_named_without_its_password():
    with pytest.raises(ConfigError, match=r"^DATABASE_URL: ") as error:
        require_database(f"postgresql://postgres:hunter2@127.0.0.1:{free_port()}/x")
    assert "hunter2" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", ["redis://:hunter2@127.0.0.1:1/0", "http://127.0.0.1:1"])
def test_a_redis_that_does_not_answer_or_is_none_is_named(url):
    with pytest.raises(ConfigError, match=r"^REDIS_URL: ") as error:
        require_redis(url)
    assert "hunter2" not in str(error.value)


@pytest.mark.db
def test_servers_that_answer_are_taken(postgres, redis_server):
    assert require_database(postgres.url) == postgres.url
    assert require_redis(redis_server.url) == redis_server.url
