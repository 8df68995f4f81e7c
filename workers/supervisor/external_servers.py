"""Checks the servers that DATABASE_URL and REDIS_URL name before anything starts, so that an error is one clear
line."""

from __future__ import annotations

import psycopg
import redis

from controller.core.errors import ConfigError

TIMEOUT_S = 5


def require_database(url: str) -> str:
    """Returns the URL if a connection succeeds. Raises ConfigError, without the URL, which may contain a password."""
    try:
        with psycopg.connect(url, connect_timeout=TIMEOUT_S):
            return url
    except psycopg.Error as error:
        raise ConfigError(f"DATABASE_URL: {_first_line(error)}", "DATABASE_URL") from error


def require_redis(url: str) -> str:
    """Returns the URL if Redis responds. Raises ConfigError."""
    try:
        client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise ConfigError(f"REDIS_URL: {_first_line(error)}", "REDIS_URL") from error
    client.close()
    return url


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
