"""Callers of every kind: anonymous, people of each role, a tenant's key, another tenant's key."""

from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from api.control.access.throttle import _LocalThrottle
from tests import factories

ROOT = "/api/v1"


class Caller:
    """JSON in and out, addresses under /api/v1. CSRF is checked as it is for a browser."""

    def __init__(self, user: Any = None, secret: str | None = None) -> None:
        self.user = user
        self.client = APIClient(enforce_csrf_checks=False)
        if user is not None:
            self.client.force_login(user)
        self.headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    def _call(self, method: str, path: str, body: Any = None, query: Any = None, **headers: str) -> Any:
        call = getattr(self.client, method)
        all_headers = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if method == "get":
            return call(ROOT + path, query or {}, headers=all_headers)
        return call(ROOT + path, {} if body is None else body, format="json", headers=all_headers)

    def get(self, path: str, **query: Any) -> Any:
        return self._call("get", path, query=query)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return self._call("post", path, body, **headers)

    def put(self, path: str, body: Any = None, **headers: str) -> Any:
        return self._call("put", path, body, **headers)

    def patch(self, path: str, body: Any = None, **headers: str) -> Any:
        return self._call("patch", path, body, **headers)

    def delete(self, path: str, **headers: str) -> Any:
        return self._call("delete", path, None, **headers)


@pytest.fixture(autouse=True)
def _fresh_throttles() -> None:
    _LocalThrottle.cache.clear()


@pytest.fixture
def anonymous(db: None) -> Caller:
    return Caller()


@pytest.fixture
def viewer(db: None) -> Caller:
    return Caller(factories.user("viewer"))


@pytest.fixture
def operator(db: None) -> Caller:
    return Caller(factories.user("operator"))


@pytest.fixture
def admin(db: None) -> Caller:
    return Caller(factories.user("admin"))


@pytest.fixture
def tenant(db: None) -> Any:
    return factories.tenant()


@pytest.fixture
def tenant_key(tenant: Any) -> Caller:
    return Caller(secret=factories.api_key(tenant).secret)


@pytest.fixture
def other_key(db: None) -> Caller:
    """A key of another tenant."""
    return Caller(secret=factories.api_key().secret)
