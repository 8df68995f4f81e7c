"""Endpoints that somebody else runs (vLLM servers, compose services): observed by their health, never started here."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import requests

from controller.core.errors import ConfigError
from workers.provisioners.base import PROVISIONERS, Observed, checked_id

HEALTH_TIMEOUT_S = 1.0
PARALLEL = 16


@PROVISIONERS.register("static")
class StaticProvisioner:
    """`endpoints`: instance id to base URL. start and stop change what is registered, not what runs."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self.endpoints = dict(endpoints)

    def observe(self) -> list[Observed]:
        """All are asked at once: a dead fleet costs one time-out, not one each."""
        if not self.endpoints:
            return []
        with ThreadPoolExecutor(min(PARALLEL, len(self.endpoints))) as pool:
            return list(pool.map(_look, self.endpoints, self.endpoints.values()))

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        url = spec.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"instance {id}: a static instance needs its url (http://...)", "url")
        self.endpoints[checked_id(id)] = url

    def stop(self, id: str, grace_s: float) -> None:
        """Only forgotten: the server belongs to somebody else, and whoever drains it has waited already."""
        self.endpoints.pop(id, None)


def _look(id: str, url: str) -> Observed:
    try:
        status = requests.get(f"{url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S).status_code
    except requests.RequestException as error:
        return Observed(id, "exited", url, error=f"{type(error).__name__} at {url}/health")
    if status == 200:
        return Observed(id, "ready", url)
    return Observed(id, "starting", url, error=f"status {status} at {url}/health")
