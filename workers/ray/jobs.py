"""The Jobs REST of a Ray cluster's dashboard (seen with Ray 2.60), and its failures in words.

Its calls are made in the event loop of this process (`workers.http.call_loop`)."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from controller.core.errors import ConfigError, Unseen
from workers.http import kept_calls, outbound
from workers.http.kept_calls import KeptAnswer
from workers.ray.clusters import ADDRESS, TOKENS, RayCluster
from workers.ray.launcher import SAYS

TIMEOUT_S = 2.0
HOSTS_MAX = 200
LINE_MAX = 300
OVER = ("SUCCEEDED", "FAILED", "STOPPED")
IN_DOUBT = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")  # its processes may live on
_WORDS = {
    "RUNTIME_ENV_SETUP_FAILURE": "its runtime environment could not be set up on the node",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "Ray did not start its job in time",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "Ray could not start its job",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "no node of the cluster can run it",
    "JOB_SUPERVISOR_ACTOR_DIED": "its node was lost",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": "its job was lost",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": "its command could not be run",
}
_MEMORY = re.compile(r"(?i)out of memory|running low on memory|\boom\b|oom[- _]?kill")
_UNSTORABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # by PostgreSQL, or unreadable
_LAST = re.compile(rf"^{SAYS}ended: (.*)$", re.MULTILINE)


class ClusterUnreachable(Unseen):
    """The cluster cannot be asked; the text says why."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """`host`: of the node that runs it, "" before that. `exit_code`: of its command."""

    id: str
    status: str
    message: str = ""
    error_type: str = ""
    host: str = ""
    exit_code: int | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def in_doubt(self) -> bool:
        """Whether its engine may live on although the job is over."""
        return self.status == "FAILED" and (self.error_type in IN_DOUBT or not self.error_type)

    def told(self) -> str:
        """Why it is over, in words."""
        said = _LAST.search(self.message)
        if said and self.error_type == "JOB_ENTRYPOINT_COMMAND_ERROR":
            return _memory(said[1][:LINE_MAX], self.exit_code)
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if _MEMORY.search(self.message):
            return f"its node ran out of memory: {lines[-1][:LINE_MAX]}"
        if self.status == "STOPPED":
            return "its job was stopped on the cluster"
        words = _WORDS.get(self.error_type, "")
        detail = lines[-1][:LINE_MAX] if lines else ""
        if self.error_type == "JOB_SUPERVISOR_ACTOR_DIED":
            return words
        return _memory(": ".join(filter(None, (words, detail))), self.exit_code)


@dataclass(frozen=True, slots=True)
class HostSeen:
    """A node of the cluster. `resources`: free and total, by name. Memory in bytes."""

    name: str
    state: str
    resources: Mapping[str, tuple[float, float]]
    labels: Mapping[str, str]


class Jobs:
    """Raises ClusterUnreachable if the cluster does not answer as a Ray dashboard does."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster

    async def all(self) -> list[RayJob]:
        found = await self._asked("/api/jobs/")
        if not isinstance(found, list):
            raise ClusterUnreachable(f"{self.cluster.url} did not list its jobs")
        return [_job(each) for each in found if isinstance(each, dict) and each.get("submission_id")]

    async def one(self, id: str) -> RayJob | None:
        answer = await self._call("GET", f"/api/jobs/{id}", None)
        return None if answer.status_code == 404 else _job(self._checked(answer))

    async def submit(self, body: Mapping[str, Any]) -> str:
        """Why it was not accepted, "" if it was. Ray answers an id that exists with status 500 and a traceback."""
        answer = await self._call("POST", "/api/jobs/", body)
        if answer.status_code == 200:
            self._checked(answer)
            return ""
        if answer.status_code not in (400, 500):
            self._checked(answer)
        lines = answer.text.strip().splitlines()
        return lines[-1][:LINE_MAX] if lines else f"status {answer.status_code}"

    async def stop(self, id: str) -> None:
        """An unknown id, or a job that is over, is ignored."""
        answer = await self._call("POST", f"/api/jobs/{id}/stop", None)
        if answer.status_code != 404:
            self._checked(answer)

    async def forget(self, id: str) -> None:
        """Delete the record of a job that is over."""
        answer = await self._call("DELETE", f"/api/jobs/{id}", None)
        if answer.status_code != 404:
            self._checked(answer)

    async def log(self, id: str) -> str:
        """What its command printed. The dashboard asks the agent of its node for it, and answers 500 without one."""
        answer = await self._call("GET", f"/api/jobs/{id}/logs", None)
        if answer.status_code == 404:
            return ""
        if answer.status_code == 500:
            raise ClusterUnreachable(f"{self.cluster.url} cannot read the log of the job from its node")
        return str(self._checked(answer).get("logs") or "")

    async def hosts(self) -> list[HostSeen]:
        """At most HOSTS_MAX, sorted by name. The dashboard changes names of resources in its usage to camel case."""
        answers = self._asked(f"/api/v0/nodes?detail=1&limit={HOSTS_MAX}"), self._asked("/api/cluster_status")
        nodes, status = await asyncio.gather(*answers)
        listed, report = nodes["data"]["result"]["result"], status["data"]["clusterStatus"] or {}
        used = (report.get("loadMetricsReport") or {}).get("usageByNode") or {}
        found = [_host(each, used.get(each.get("node_id"), {})) for each in listed[:HOSTS_MAX]]
        return sorted(found, key=lambda host: host.name)

    async def _asked(self, path: str) -> Any:
        return self._checked(await self._call("GET", path, None))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> KeptAnswer:
        url, headers = f"{self.cluster.url}{path}", self.cluster.headers()
        try:
            return await kept_calls.request(
                method, url, json=body, headers=headers, timeout_s=TIMEOUT_S, to_dashboard=True
            )
        except outbound.UnboundedAnswer as error:
            raise ClusterUnreachable(f"{self.cluster.url} answered with {error}") from error
        except requests.Timeout as error:
            raise ClusterUnreachable(f"{self.cluster.url} has not responded within {TIMEOUT_S:g} s") from error
        except requests.RequestException as error:
            why = outbound.REFUSED if outbound.REFUSED in str(error) else type(error).__name__
            raise ClusterUnreachable(f"{self.cluster.url} cannot be reached: {why}") from error

    def _checked(self, answer: KeptAnswer) -> Any:
        """What the answer says, if it is that of a dashboard."""
        url, status = self.cluster.url, answer.status_code
        if status in (401, 403):
            kept = f"the token {self.cluster.name} in {TOKENS}"
            raise ClusterUnreachable(
                f"{url} refused {kept if self.cluster.token else f'the call: it asks for a token, {kept}'}"
            )
        if "json" not in answer.headers.get("content-type", ""):
            kind = clean(answer.headers.get("content-type", ""))[:LINE_MAX] or "nothing"
            raise ClusterUnreachable(
                f"{url} answered with {kind}, status {status}: {ADDRESS} must be the address of a Ray dashboard"
            )
        if status != 200:
            raise ClusterUnreachable(f"{url} answered with status {status}")
        try:
            return answer.json()
        except ValueError as error:
            raise ClusterUnreachable(f"{url} answered with broken JSON") from error


def refuse_foreign(job: RayJob, owner: str) -> None:
    """Raises ConfigError for a job that this Slackline did not submit."""
    if (job.metadata or {}).get("slackline") != owner:
        told = f"the cluster has a job named {job.id} that is not of this Slackline: use another id"
        raise ConfigError(told, "id")


def clean(text: object) -> str:
    """What a cluster or a node says in words, as a row can have it and a page can show it."""
    return _UNSTORABLE.sub("", str(text))


def _memory(text: str, code: int | None) -> str:
    return f"{text} (killed, as a host does that is out of memory)" if code == 137 else text


def _job(said: Mapping[str, Any]) -> RayJob:
    code = said.get("driver_exit_code")
    return RayJob(
        id=str(said["submission_id"]),
        status=str(said.get("status", "")),
        message=clean(said.get("message") or ""),
        error_type=str(said.get("error_type") or ""),
        host=_host_of(str(said.get("driver_agent_http_address") or "")),
        exit_code=code if isinstance(code, int) else None,
        metadata={str(name): str(value) for name, value in (said.get("metadata") or {}).items()},
    )


def _host_of(address: str) -> str:
    """The host of an address whose port may be -1, as Ray writes it."""
    return urlsplit(re.sub(r":-\d+$", "", address)).hostname or ""


def _host(said: Mapping[str, Any], used: Mapping[str, Any]) -> HostSeen:
    taken = {
        _folded(name): pair[0] for name, pair in used.items() if isinstance(pair, list) and pair and _amount(pair[0])
    }
    alive = said.get("state") == "ALIVE"
    resources = {
        clean(name): (max(0.0, total - taken.get(_folded(name), 0.0)) if alive else 0.0, total)
        for name, total in (said.get("resources_total") or {}).items()
        if not name.startswith("node:") and name != "object_store_memory" and _amount(total)
    }
    labels = {
        clean(name): clean(value)
        for name, value in (said.get("labels") or {}).items()
        if not name.startswith("ray.io/")
    }
    return HostSeen(clean(said.get("node_ip", "")), clean(said.get("state", "")).lower(), resources, labels)


def _amount(value: Any) -> bool:
    """JSON as Python reads it may have NaN, which PostgreSQL does not store."""
    return type(value) in (int, float) and math.isfinite(value)


def _folded(name: str) -> str:
    return name.replace("_", "").lower()
