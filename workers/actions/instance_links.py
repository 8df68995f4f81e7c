"""Keeps the KV links of reference engines as the fleet needs them, and stores what the engines report about them.

It is level-triggered: each run asks every engine that can keep links, announces the peers to those that keep other
links than needed, and stores all reports. An engine that joins gets its peers before gateways see it (`join`), so that
its links exist before its first request.

A run takes at most twice ASK_S, however many engines hang. The other engines keep their links to an engine that does
not respond, since links break and reconnect by themselves; the address of that engine is remembered. Synchronous, for
Celery tasks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import requests
from django.conf import settings
from django.db.models import QuerySet

from controller.core.kv_links import LinkReport, report_from_json
from controller.models import Decision, Instance, InstanceLink
from controller.models.fleet import Weights
from controller.services.fleet.instance_links import instance_links_observe
from workers.actions.fleet_calls import call_fleet
from workers.actions.instance_keys import key_of
from workers.actions.parallel_calls import ThreadCalls
from workers.actions.peers import PeerMember, need_links, peers
from workers.actions.weights_client import EngineAway
from workers.http import outbound
from workers.http.engine_keys import NO_KEY, EngineKey
from workers.http.fleet_proof import NoChallenge

log = logging.getLogger(__name__)

LINKS_PATH = "/links"
CALL_S = 1.0
JOIN_WAIT_S = 1.0  # for the first attempt to connect each link of an engine that joins
ASK_S = 1.2  # for all engines together
ASK_AGAIN_S = 30.0  # engines whose models need no links: one may have been started again, and borrow now
LINKABLE = ("reference",)  # backends whose engines keep links; others connect with their first KV transfer
THERE = (Instance.Observed.READY, Instance.Observed.DRAINING, Instance.Observed.UNREACHABLE)


PARALLEL, ANNOUNCER = ThreadCalls(), ThreadCalls()


@dataclass(frozen=True, slots=True)
class EngineLinks:
    """The answer of one engine. `id`: its instance id as last announced to it; `host`, `port`: where others pull its KV
    (host "": it has no KV transfers); `reports`: one for each link over which it pulls; `borrows`: whether it copies
    prefixes, which engines of older versions do not say."""

    id: str
    host: str
    port: int
    reports: tuple[LinkReport, ...]
    borrows: bool = False


KNOWN: dict[tuple[str, str], EngineLinks] = {}  # the last answer of each engine, by id and URL
# By id and URL of every engine that was asked: when, in monotonic seconds, and whether it borrows.
ASKED: dict[tuple[str, str], tuple[float, bool]] = {}


class LinksClient:
    """The `/links` endpoint of one engine."""

    def __init__(self, url: str, token: str, key: EngineKey = NO_KEY) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._key = key

    def look(self) -> EngineLinks:
        """Raises EngineAway."""
        return self._call()

    def announce(self, me: str, wanted: Sequence[PeerMember], wait_s: float = 0.0) -> EngineLinks:
        """Have the engine keep links to exactly these peers. `me`: its own id; `wait_s`: how long it may wait for the
        first attempt of each link. Raises EngineAway."""
        peers = [{"id": each.id, "host": each.host, "port": each.port} for each in wanted]
        return self._call({"id": me, "peers": peers, "wait_s": wait_s}, CALL_S + wait_s)

    def _call(self, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_S) -> EngineLinks:
        try:
            if body is None:
                answer = outbound.get(self._url + LINKS_PATH, headers=self._key.headers(), timeout=timeout_s)
            else:
                token, key = self._token, self._key
                answer = call_fleet("POST", self._url, LINKS_PATH, token, body=body, timeout=timeout_s, key=key)
            answer.raise_for_status()
            said = answer.json()
            at = said["at"] or {"host": "", "port": 0}
            reports = tuple(report_from_json(each) for each in said["peers"])
            borrows = said.get("borrows") is True
            return EngineLinks(str(said["id"]), str(at["host"]), int(at["port"]), reports, borrows)
        except (requests.RequestException, NoChallenge, ValueError, KeyError, TypeError) as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}{LINKS_PATH}: {error}") from error


def update_links(token: str | None = None) -> list[Decision]:
    """Update the links of the whole fleet once; returns new decisions. `token`: None takes FLEET_TOKEN."""
    rows = _rows()
    if not rows and not InstanceLink.objects.filter(closed_at__isnull=True).exists():
        return []
    found = _answers(PARALLEL, {row.pk: _client(row, token).look for row in rows}, ASK_S)
    _remember(rows, found)
    _note_borrowers(rows, found)
    known = {row.pk: KNOWN[row.pk, row.url] for row in rows if (row.pk, row.url) in KNOWN}
    wanted = peers(_members(rows, known))
    able = {name for name, links in found.items() if links.host}  # an engine of several ranks, for example, is not
    differ = [row for row in rows if row.pk in able and _differs(row, found[row.pk], wanted[row.pk])]
    calls = {row.pk: partial(_client(row, token).announce, row.pk, wanted[row.pk]) for row in differ}
    announced = _answers(ANNOUNCER, calls, ASK_S)
    _remember(rows, announced)
    unasked = {name: links for name, links in known.items() if not PARALLEL.silent(name)}  # no thread was free for them
    heard = {name: links.reports for name, links in {**unasked, **found, **announced}.items()}
    models = {row.pk: row.model.name for row in rows}
    return instance_links_observe(heard=heard, silent=models.keys() - heard.keys(), models=models)


def join(row: Instance, url: str, token: str | None = None) -> None:
    """Make the links from and to an engine before gateways see it. Each link is connected, or was tried once.

    Takes a few seconds at most. The next run retries links that failed.
    """
    if row.backend not in LINKABLE:
        return
    rows = [each for each in _there().filter(model=row.model_id) if each.pk != row.pk]
    if not need_links(map(_member, (*rows, row))):
        return
    row.url = url or row.url
    there = [*rows, row]
    found = _answers(ThreadCalls(), {each.pk: _client(each, token).look for each in there}, ASK_S)
    wanted = peers(_members(there, found))
    concerned = {each.pk: each for each in there if each.pk in found and found[each.pk].host and wanted[each.pk]}
    calls = {
        name: partial(_client(each, token).announce, name, wanted[name], JOIN_WAIT_S)
        for name, each in concerned.items()
    }
    announced = _answers(ThreadCalls(), calls, ASK_S + JOIN_WAIT_S)
    if missing := calls.keys() - announced.keys():
        log.warning("%s joins without the links of %s", row.pk, ", ".join(sorted(missing)))


def _answers(
    through: ThreadCalls, calls: Mapping[str, Callable[[], EngineLinks]], within_s: float
) -> dict[str, EngineLinks]:
    """The answers of the engines that responded in time."""
    found = {}
    for name, answer in through.ask(calls, within_s).items():
        try:
            found[name] = answer.result()
        except EngineAway as error:
            log.info("links of %s: %s", name, error)
    return found


def _remember(rows: Iterable[Instance], found: Mapping[str, EngineLinks]) -> None:
    """Store the answers in KNOWN, and drop those of engines that are gone."""
    urls = {row.pk: row.url for row in rows}
    for key in [key for key in KNOWN if urls.get(key[0]) != key[1]]:
        del KNOWN[key]
    KNOWN.update({(name, urls[name]): links for name, links in found.items()})


def _note_borrowers(rows: Iterable[Instance], found: Mapping[str, EngineLinks]) -> None:
    """One that did not answer is as it was."""
    for row in rows:
        links, (_, before) = found.get(row.pk), ASKED.get((row.pk, row.url), (0.0, False))
        ASKED[row.pk, row.url] = time.monotonic(), before if links is None else links.borrows


def _rows() -> list[Instance]:
    """Engines that can keep links, of models whose instances have KV to exchange. Now and then those of other models
    too, since an engine alone knows whether it borrows prefixes."""
    rows = list(_there())
    for key in ASKED.keys() - {(row.pk, row.url) for row in rows}:
        del ASKED[key]
    busy = {row.model_id for row in rows if need_links([_member(row)])}
    again = time.monotonic() - ASK_AGAIN_S
    return [row for row in rows if row.model_id in busy or ASKED.get((row.pk, row.url), (-math.inf, False))[0] <= again]


def _there() -> QuerySet[Instance]:
    rows = Instance.objects.live().select_related("model").filter(backend__in=LINKABLE, observed_state__in=THERE)
    return rows.exclude(url="").order_by("pk")


def _members(rows: Iterable[Instance], found: Mapping[str, EngineLinks]) -> list[PeerMember]:
    members = []
    for row in rows:
        links = found.get(row.pk)
        member = _member(row)
        members.append(replace(member, host=links.host, port=links.port, borrows=links.borrows) if links else member)
    return members


def _member(row: Instance) -> PeerMember:
    _, borrows = ASKED.get((row.pk, row.url), (0.0, False))
    return PeerMember(row.pk, row.model.name, row.role, "", 0, row.weights != Weights.PRESENT, borrows)


def _differs(row: Instance, links: EngineLinks, wanted: Sequence[PeerMember]) -> bool:
    has = {(report.peer, report.host, report.port) for report in links.reports}
    return has != {(each.id, each.host, each.port) for each in wanted} or (links.id != row.pk and bool(wanted))


def _client(row: Instance, token: str | None) -> LinksClient:
    return LinksClient(row.url, settings.FLEET_TOKEN if token is None else token, key_of(row))
