"""Engines as jobs of a Ray cluster that exists: the cluster places them, and `workers.ray.launcher` starts them there.

One look asks the cluster for its jobs and each launcher for its engine, at the same time. Each asking renews the
lease of that engine, also while the head of the cluster is unavailable. A job that is over is no dead engine: it is
`lost` until its launcher has ended, or has been out of reach for LOST_S.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from django.conf import settings

from controller.core.errors import ConfigError
from controller.engine.start_steps import PROCESS, STEPS
from controller.models import Instance
from controller.scale.provisioning import RAY, source_of
from workers.actions.parallel_calls import LoopCalls
from workers.http.call_loop import LOOP
from workers.provisioners.base import PROVISIONERS, LogTail, Observed, Provisioner, checked_id
from workers.provisioners.logs import plain
from workers.ray.clusters import ADDRESS, RayCluster, clusters
from workers.ray.control import LauncherClient, LauncherGone, LauncherUnreachable, control_port
from workers.ray.jobs import LINE_MAX, ClusterUnreachable, HostSeen, Jobs, RayJob, clean, refuse_foreign
from workers.ray.launches import OWNER, ROW, job_of, owner_of
from workers.ray.wants import why_pending

ASK_S = 2.2  # for the jobs, the hosts and all launchers together
FOUND_S = 1.0  # then for the launchers of new jobs
DOUBT_S = 5.0  # a launcher may be silent this long, then its engine counts as unhealthy
LOST_S = 90.0  # longer than Ray takes to end a node that is cut off, and its orphan then
DRAIN_S, GRACE_S = 10.0, 5.0  # of an orphan
NO_TOKEN = "FLEET_TOKEN is required for Ray clusters: launchers and engines know Slackline by it"
LATEST_S = 1e10  # epoch seconds that a date can have
ORPHANED = "its node or its job was lost"
Observe = Instance.Observed


@dataclass(frozen=True, slots=True)
class KnownJob:
    """An instance's row. `made`: when it was made, as its job's metadata has it. `lost_for_s`: since it is lost."""

    url: str = ""
    made: str = ""
    state: str = Observe.PENDING
    wanted: bool = True
    lost_for_s: float = 0.0
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ClusterMemory:
    """What a process keeps of a cluster between its looks. All of it can be found again."""

    calls: LoopCalls = field(default_factory=LoopCalls)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # host and control port
    silent: dict[str, float] = field(default_factory=dict)  # since when, by a monotonic clock
    refused: dict[str, str] = field(default_factory=dict)  # jobs that were not accepted, and why
    lock: threading.Lock = field(default_factory=threading.Lock)


MEMORIES: dict[str, ClusterMemory] = {}


@PROVISIONERS.register(RAY)
class RayProvisioner:
    """One cluster. `rows`: its live instances, by id."""

    def __init__(
        self, cluster: RayCluster, token: str, rows: Mapping[str, KnownJob], memory: ClusterMemory | None = None
    ) -> None:
        self.cluster, self.token, self.rows = cluster, token, rows
        self.jobs, self.owner = Jobs(cluster), owner_of(token)
        self._memory = memory or ClusterMemory()
        self.hosts_seen: list[HostSeen] = []

    @classmethod
    def here(cls, data_dir: Path) -> Mapping[str, Provisioner]:
        """Those of RAY_ADDRESS and those of live instances, by source."""
        rows: dict[str, dict[str, KnownJob]] = {}
        for row in Instance.objects.live().filter(provisioner=RAY):
            rows.setdefault(row.source, {})[row.pk] = _known(row)
        problem, token, configured = "", settings.FLEET_TOKEN, dict[str, RayCluster]()
        try:
            configured = clusters(settings.RAY_ADDRESS, settings.RAY_TOKENS_DIR)
        except ConfigError as error:
            problem = str(error)
        found: dict[str, Provisioner] = {}
        for cluster in configured.values():
            source = source_of(RAY, cluster.name)
            ours = cls(cluster, token, rows.get(source, {}), MEMORIES.setdefault(source, ClusterMemory()))
            found[source] = ours if token else UnusableCluster(NO_TOKEN)
        for source in rows.keys() - found.keys():
            found[source] = UnusableCluster(
                problem or f"{ADDRESS} of this worker does not name the cluster of {source}"
            )
        return found

    def observe(self) -> list[Observed]:
        """Raises ClusterUnreachable; the leases of all engines are renewed nevertheless."""
        with self._memory.lock:
            return self._observe()

    def hosts(self) -> list[HostSeen]:
        """Nodes of the cluster as of the last look; empty if they could not be read."""
        return self.hosts_seen

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        """Submit its job. One of this id that exists is read back, so a repeated start does nothing. An instance that
        was made after the rows were read starts in the next round: its job needs to tell which row it is of. Raises
        ConfigError if the cluster refuses the job: `observe` reports the instance as exited then."""
        if id not in self.rows:
            return
        if id in self._memory.refused:
            raise ConfigError(self._memory.refused[id], "template")
        body = job_of(checked_id(id), spec, self.token, self._row(id).made)
        if not (refused := LOOP.run(self.jobs.submit(body))):
            return
        job = LOOP.run(self.jobs.one(id))
        if job is None:
            raise self._refusal(id, refused)
        refuse_foreign(job, self.owner)
        if job.over and (job.metadata or {}).get(ROW) != self._row(id).made:  # of an earlier instance
            LOOP.run(self.jobs.forget(id))
            if refused := LOOP.run(self.jobs.submit(body)):
                raise self._refusal(id, refused)

    def _refusal(self, id: str, why: str) -> ConfigError:
        self._memory.refused[id] = f"{self.cluster.url} refused the job: {why}"
        return ConfigError(self._memory.refused[id], "template")

    def stop(self, id: str, grace_s: float) -> None:
        """Through its launcher, which waits for the requests; Ray itself kills a job after three seconds."""
        launcher = self._launcher(id)
        if launcher is not None:
            try:
                LOOP.run(launcher.end(0.0, grace_s))
                return
            except (LauncherGone, LauncherUnreachable):
                pass
        job = LOOP.run(self.jobs.one(id))
        if job is not None and not job.over and self._ours(job):
            LOOP.run(self.jobs.stop(id))

    def log(self, id: str) -> LogTail | None:
        """Raises OSError if neither the launcher nor the cluster tells it."""
        launcher = self._launcher(id)
        try:
            if launcher is not None:
                said = LOOP.run(launcher.log())
                return LogTail(plain(str(said["text"])), bool(said["cut"]), float(said["written_at"]))
        except (LauncherGone, LauncherUnreachable, KeyError, ValueError):
            pass
        try:
            job = LOOP.run(self.jobs.one(id))
            if job is None or not self._ours(job):
                return None
            told = job.message if job.over else LOOP.run(self.jobs.log(id))  # which ends with what was printed last
            text = told.partition("\n")[2]  # without the line of its command
        except ClusterUnreachable as error:
            raise OSError(str(error)) from error
        return LogTail(plain(text[-65536:]), len(text) > 65536, time.time())

    # -- one look --------------------------------------------------------------------------------------------------

    def _observe(self) -> list[Observed]:
        calls: dict[Any, Callable[[], Awaitable[Any]]] = {("jobs",): self.jobs.all, ("hosts",): self.jobs.hosts}
        self._memory.places = {id: at for id, at in self._memory.places.items() if id in self.rows}
        self._memory.refused = {id: why for id, why in self._memory.refused.items() if id in self.rows}
        for id in self.rows:
            if (launcher := self._launcher(id)) is not None:
                calls[("launcher", id)] = launcher.lease if self._leased(id) else launcher.status
        done = self._memory.calls.ask(calls, ASK_S)
        if ("jobs",) not in done:
            raise ClusterUnreachable(f"{self.cluster.url} has not responded within {ASK_S:g} s")
        jobs = {job.id: job for job in done.pop(("jobs",)).result() if self._ours(job)}
        hosts = done.pop(("hosts",), None)
        self.hosts_seen = [] if hosts is None or hosts.exception() is not None else hosts.result()
        answers: dict[str, Any] = {id: _outcome(future) for (_, id), future in done.items()}
        for id in [id for id, answer in answers.items() if isinstance(answer, LauncherGone)]:
            self._memory.places.pop(id, None)  # of an earlier instance, or its end
        answers |= self._found(jobs, answers)
        seen = [self._seen(id, jobs.get(id), answers.get(id)) for id in sorted(self.rows)]
        strays = [Observed(id, "starting", error="no instance of this name") for id in self._strays(jobs)]
        return [each for each in (*seen, *strays) if each is not None]

    def _found(self, jobs: Mapping[str, RayJob], answers: Mapping[str, Any]) -> dict[str, Any]:
        """The first lease of engines whose launcher is not known yet."""
        new = [
            job
            for id, job in jobs.items()
            if job.status == "RUNNING" and job.host and id in self.rows and self._current(job)
            if id not in self._memory.places and not isinstance(answers.get(id), dict)
        ]
        ask = self._memory.calls.ask
        ports = {
            id: _outcome(each)
            for (_, id), each in ask({("port", job.id): self._port_of(job) for job in new}, FOUND_S).items()
        }
        for id, port in ports.items():
            if isinstance(port, int):
                self._memory.places[id] = (jobs[id].host, port)
        ready = [job.id for job in new if job.id in self._memory.places]
        calls = {("launcher", id): launcher.lease for id in ready if (launcher := self._launcher(id)) is not None}
        silent = {id: port for id, port in ports.items() if isinstance(port, Exception)}
        return silent | {id: _outcome(future) for (_, id), future in ask(calls, FOUND_S).items()}

    def _port_of(self, job: RayJob) -> Callable[[], Awaitable[int | None]]:
        return lambda: control_port(job.id, self._row(job.id).made, job.host, self.token)

    def _seen(self, id: str, job: RayJob | None, answer: Any) -> Observed | None:
        row = self.rows[id]
        if job is not None and not self._current(job):
            job = None
        if job is None or job.over:
            return self._after(id, row, job, answer)
        if job.status == "PENDING":
            return Observed(id, "pending", error=why_pending(job.message, row.spec, self.hosts_seen))
        if isinstance(answer, dict) and answer.get("orphan"):  # Ray says so some 20 s later
            ended = answer.get("state") == "ended"
            return Observed(id, "exited", row.url, error=ORPHANED) if ended else self._orphan(id, ORPHANED)
        if row.state == Observe.LOST and isinstance(answer, LauncherGone):
            return Observed(id, "exited", row.url, error=ORPHANED)
        if isinstance(answer, dict):
            self._memory.silent.pop(id, None)
            return _reported(id, answer, self._memory.places[id][0], row)
        return self._silent(id, row, answer)

    def _silent(self, id: str, row: KnownJob, answer: Any) -> Observed:
        """Its job runs and its launcher does not answer."""
        for_s = time.monotonic() - self._memory.silent.setdefault(id, time.monotonic())
        why = str(answer) if answer is not None else "its launcher has not reported its port yet"
        if row.state in (Observe.PENDING, Observe.STARTING) and not row.url:
            return Observed(id, "pending", error=why if for_s > DOUBT_S else "its launcher starts")
        if for_s > DOUBT_S:
            return Observed(id, "unhealthy", row.url, error=why)
        known = {Observe.READY: "ready", Observe.DRAINING: "ready", Observe.STARTING: "starting"}
        return Observed(id, known.get(Observe(row.state), "unhealthy"), row.url)

    def _after(self, id: str, row: KnownJob, job: RayJob | None, answer: Any) -> Observed | None:
        """There is no job any more, or it is over."""
        told = "the cluster no longer knows its job" if job is None else job.told()
        if isinstance(answer, dict) and answer.get("state") != "ended":
            return self._orphan(id, told)
        if job is None and id in self._memory.refused:
            return Observed(id, "exited", error=self._memory.refused[id]) if row.wanted else None
        if job is None and row.state == Observe.PENDING and not row.url:
            return None  # it was not started yet
        code = None if job is None or job.exit_code is None else job.exit_code
        code = 128 - code if code is not None and code > 128 else code
        gone = (
            isinstance(answer, dict | LauncherGone)
            or self._launcher(id) is None
            or (job is not None and not job.in_doubt)
        )
        if not gone and row.lost_for_s < LOST_S:
            wait_s = LOST_S - row.lost_for_s
            return Observed(id, "lost", row.url, error=f"{told}; its engine counts as ended in {wait_s:.0f} s at most")
        if not row.wanted:
            return None
        return Observed(id, "exited", row.url, exit_code=code, error=told)

    def _orphan(self, id: str, told: str) -> Observed:
        """It gets no new requests, ends those that run, and is replaced once it has ended."""
        if (launcher := self._launcher(id)) is not None:
            self._memory.calls.ask({("end", id): lambda: launcher.end(DRAIN_S, GRACE_S)}, FOUND_S)
        return Observed(id, "lost", self.rows[id].url, error=f"{told}; its engine still runs and is drained")

    def _strays(self, jobs: Mapping[str, RayJob]) -> list[str]:
        """Jobs of ours that run for no row, or for an earlier one of the same id."""
        return [id for id, job in jobs.items() if not job.over and id not in self.rows]

    def _leased(self, id: str) -> bool:
        return self.rows[id].wanted and self.rows[id].state != Observe.LOST

    def _launcher(self, id: str) -> LauncherClient | None:
        """None: nobody knows where it is."""
        if (place := self._memory.places.get(id)) is None and id in self.rows and self.rows[id].url:
            split = urlsplit(self.rows[id].url)
            if split.hostname and split.port:
                place = self._memory.places[id] = (split.hostname, split.port + 1)
        return None if place is None else LauncherClient(id, self._row(id).made, *place, self.token)

    def _row(self, id: str) -> KnownJob:
        return self.rows.get(id, KnownJob())

    def _ours(self, job: RayJob) -> bool:
        return (job.metadata or {}).get(OWNER) == self.owner

    def _current(self, job: RayJob) -> bool:
        return (job.metadata or {}).get(ROW) == self._row(job.id).made


class UnusableCluster:
    """A cluster that this worker cannot ask: its instances stay as they were last seen."""

    def __init__(self, why: str) -> None:
        self.why = why

    @classmethod
    def here(cls, data_dir: Path) -> None:
        """There is nothing to be found of it."""

    def observe(self) -> list[Observed]:
        raise ClusterUnreachable(self.why)

    def hosts(self) -> list[HostSeen]:
        return []

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        raise ConfigError(self.why)

    def stop(self, id: str, grace_s: float) -> None:
        raise ConfigError(self.why)

    def log(self, id: str) -> LogTail | None:
        raise OSError(self.why)


def _known(row: Instance) -> KnownJob:
    at = row.observed_at if row.observed_state == Observe.LOST else None
    lost_for_s = 0.0 if at is None else (datetime.now(UTC) - at).total_seconds()
    wanted = row.desired_state != Instance.Desired.STOPPED
    made = f"{row.created_at.timestamp():.6f}"
    return KnownJob(row.url, made, row.observed_state, wanted, lost_for_s, row.spec)


def _outcome(future: Any) -> Any:
    """A launcher's answer, or why there is none."""
    error = future.exception()
    if error is not None and not isinstance(error, LauncherGone | LauncherUnreachable):
        return LauncherUnreachable(f"{type(error).__name__}: {error}")
    return future.result() if error is None else error


def _reported(id: str, said: Mapping[str, Any], host: str, row: KnownJob) -> Observed:
    """As a launcher reports its engine. One that waits has not got its first lease yet."""
    states = {"starting": "starting", "ready": "ready", "unhealthy": "unhealthy", "ended": "exited"}
    state = str(said.get("state"))
    shown, port = f"[{host}]" if ":" in host else host, said.get("port")
    if state == "waiting" or (state == "ending" and row.wanted and row.state == Observe.PENDING):
        return Observed(id, "pending", error="its launcher starts")
    if type(port) is not int or not 0 < port < 1 << 16:  # text could name another host
        return Observed(id, "unhealthy", row.url, error="its launcher reported no port")
    url = f"http://{shown}:{port}"
    if state == "ending":
        return Observed(id, "lost" if row.wanted else "stopping", url, error=clean(said.get("error") or "it is ending"))
    pid, code, started_at = said.get("pid"), said.get("exit_code"), _started_at(said)
    return Observed(
        id,
        states.get(state, "unhealthy"),
        url,
        pid=pid if type(pid) is int else None,
        started_at=started_at,
        exit_code=code if type(code) is int else None,
        error=clean(said.get("error") or "")[:LINE_MAX],
        steps={} if started_at is None else {name: started_at + after for name, after in _steps_s(said).items()},
    )


def _steps_s(said: Mapping[str, Any]) -> dict[str, float]:
    """Seconds after the start of its process at which each step was reached. Launchers of an earlier release tell times
    of their node's clock."""
    told = said.get("steps_s")
    if isinstance(told, Mapping):
        return {name: told[name] for name in STEPS if _is_time(told.get(name))}
    told = said.get("steps")
    if not isinstance(told, Mapping) or not _is_time(began := told.get(PROCESS)):
        return {}
    return {name: max(0.0, told[name] - began) for name in STEPS if _is_time(told.get(name))}


def _started_at(said: Mapping[str, Any]) -> float | None:
    """By our own clock."""
    asked_at, age_s = said.get("asked_at"), said.get("age_s")
    return float(asked_at - age_s) if _is_time(asked_at) and _is_time(age_s) else None


def _is_time(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 <= value < LATEST_S  # type: ignore[operator]
