"""Keeps the engines' links as the fleet wants them, and their rows as the engines report them. Synchronous, for tasks.

Level-triggered: each look asks every engine that can keep links, tells those whose peers are not the wanted ones, and
stores what all of them say. An engine that joins is told before gateways hear of it (`join`), so that its links are
there before its first request.

However many engines hang, a look takes ASK_S twice at most. Of an engine that is silent the others keep their links,
which break and mend by themselves: where it was reached is remembered.
"""

from __future__ import annotations

import logging
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
from controller.scale.peers import PeerMember, need_links, peers
from controller.services.instance_links import instance_links_observe
from workers.actions.parallel_calls import Asker
from workers.actions.weights_client import EngineAway

log = logging.getLogger(__name__)

CALL_S = 1.0
JOIN_WAIT_S = 1.0  # for the first try of each link of an engine that joins
ASK_S = 1.2  # for all engines together
LINKABLE = ("reference",)  # backends whose engines keep links; the others' connectors connect with their first transfer
THERE = (Instance.Observed.READY, Instance.Observed.DRAINING, Instance.Observed.UNREACHABLE)


ASKER, TELLER = Asker(), Asker()


@dataclass(frozen=True, slots=True)
class Told:
    """What one engine says: its own id as it was told, where its KV is pulled from ("": it moves none), its links."""

    id: str
    host: str
    port: int
    reports: tuple[LinkReport, ...]


KNOWN: dict[tuple[str, str], Told] = {}  # the last that each engine said, by id and url


class LinksClient:
    """Of one engine."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/") + "/links"
        self._token = token

    def look(self) -> Told:
        """Raises EngineAway."""
        return self._call("GET")

    def announce(self, me: str, wanted: Sequence[PeerMember], wait_s: float = 0.0) -> Told:
        """Raises EngineAway."""
        peers = [{"id": each.id, "host": each.host, "port": each.port} for each in wanted]
        return self._call("POST", {"token": self._token, "id": me, "peers": peers, "wait_s": wait_s}, CALL_S + wait_s)

    def _call(self, method: str, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_S) -> Told:
        try:
            answer = requests.request(method, self._url, json=body, timeout=timeout_s)
            answer.raise_for_status()
            said = answer.json()
            at = said["at"] or {"host": "", "port": 0}
            reports = tuple(report_from_json(each) for each in said["peers"])
            return Told(str(said["id"]), str(at["host"]), int(at["port"]), reports)
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise EngineAway(f"{type(error).__name__} at {self._url}: {error}") from error


def update_links(token: str | None = None) -> list[Decision]:
    """One look at the whole fleet."""
    rows = _rows()
    if not rows and not InstanceLink.objects.filter(closed_at__isnull=True).exists():
        return []
    told = _heard(ASKER, {row.pk: _client(row, token).look for row in rows}, ASK_S)
    _remember(rows, told)
    known = {row.pk: KNOWN[row.pk, row.url] for row in rows if (row.pk, row.url) in KNOWN}
    wanted = peers(_members(rows, known))
    moves = {name for name, said in told.items() if said.host}  # one of several ranks, say, refuses to be told
    differ = [row for row in rows if row.pk in moves and _differs(row, told[row.pk], wanted[row.pk])]
    asked = {row.pk: partial(_client(row, token).announce, row.pk, wanted[row.pk]) for row in differ}
    now_told = _heard(TELLER, asked, ASK_S)
    _remember(rows, now_told)
    unasked = {name: said for name, said in known.items() if not ASKER.silent(name)}  # for them there was no thread
    heard = {name: said.reports for name, said in {**unasked, **told, **now_told}.items()}
    models = {row.pk: row.model.name for row in rows}
    return instance_links_observe(heard=heard, silent=models.keys() - heard.keys(), models=models)


def join(row: Instance, url: str, token: str | None = None) -> None:
    """Before gateways hear of an engine: its links from others and theirs from it are made, or were tried once.

    Takes a few seconds at most; what fails is left to the next look.
    """
    if row.backend not in LINKABLE:
        return
    rows = [each for each in _there().filter(model=row.model_id) if each.pk != row.pk]
    if not need_links(map(_member, (*rows, row))):
        return
    row.url = url or row.url
    there = [*rows, row]
    told = _heard(Asker(), {each.pk: _client(each, token).look for each in there}, ASK_S)
    wanted = peers(_members(there, told))
    concerned = {each.pk: each for each in there if each.pk in told and told[each.pk].host and wanted[each.pk]}
    asked = {
        name: partial(_client(each, token).announce, name, wanted[name], JOIN_WAIT_S)
        for name, each in concerned.items()
    }
    now_told = _heard(Asker(), asked, ASK_S + JOIN_WAIT_S)
    if missing := asked.keys() - now_told.keys():
        log.warning("%s joins without the links of %s", row.pk, ", ".join(sorted(missing)))


def _heard(asker: Asker, calls: Mapping[str, Callable[[], Told]], within_s: float) -> dict[str, Told]:
    """What those say that answered in time."""
    told = {}
    for name, answer in asker.ask(calls, within_s).items():
        try:
            told[name] = answer.result()
        except EngineAway as error:
            log.info("links of %s: %s", name, error)
    return told


def _remember(rows: Iterable[Instance], told: Mapping[str, Told]) -> None:
    """Those that are gone are forgotten."""
    urls = {row.pk: row.url for row in rows}
    for key in [key for key in KNOWN if urls.get(key[0]) != key[1]]:
        del KNOWN[key]
    KNOWN.update({(name, urls[name]): said for name, said in told.items()})


def _rows() -> list[Instance]:
    """Engines that keep links, of models of which any have something to exchange."""
    rows = list(_there())
    busy = {row.model_id for row in rows if need_links([_member(row)])}
    return [row for row in rows if row.model_id in busy]


def _there() -> QuerySet[Instance]:
    rows = Instance.objects.live().select_related("model").filter(backend__in=LINKABLE, observed_state__in=THERE)
    return rows.exclude(url="").order_by("pk")


def _members(rows: Iterable[Instance], told: Mapping[str, Told]) -> list[PeerMember]:
    members = []
    for row in rows:
        said = told.get(row.pk)
        members.append(replace(_member(row), host=said.host, port=said.port) if said else _member(row))
    return members


def _member(row: Instance) -> PeerMember:
    return PeerMember(row.pk, row.model.name, row.role, "", 0, row.weights != Weights.PRESENT)


def _differs(row: Instance, said: Told, wanted: Sequence[PeerMember]) -> bool:
    has = {(report.peer, report.host, report.port) for report in said.reports}
    return has != {(each.id, each.host, each.port) for each in wanted} or (said.id != row.pk and bool(wanted))


def _client(row: Instance, token: str | None) -> LinksClient:
    return LinksClient(row.url, settings.FLEET_TOKEN if token is None else token)
