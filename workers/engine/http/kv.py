"""`/links`: the links over which this engine pulls KV, and their state. `/kv/release`: releases KV that no engine will
pull."""

from __future__ import annotations

from workers.engine import fields
from workers.engine.checkpoints import LONGEST_LEASE_S, CheckpointLeases
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler
from workers.engine.http.guard import FleetGuard
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.links import Peer

MOST_PEERS = 1_000
MOST_NAMES = 100_000
LONGEST_WAIT_S = 5.0


class KvEndpoints:
    """`disaggregation`: None for an engine without the fleet's token, which has no KV transfers."""

    def __init__(self, disaggregation: Disaggregation | None, guard: FleetGuard, checkpoints: CheckpointLeases) -> None:
        self._checkpoints = checkpoints
        self._disaggregation = disaggregation
        self._guard = guard

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {
            "/links": {"GET": self.links, "POST": self._guard(self.announce)},
            "/kv/release": {"POST": self._guard(self.release)},
            "/kv/renew": {"POST": self._guard(self.renew)},
        }

    async def links(self, exchange: Exchange) -> None:
        """Return the address from which other engines pull KV (null: this engine has no KV transfers), each link, and
        whether this engine borrows prefixes."""
        await exchange.reply(self._described())

    async def announce(self, exchange: Exchange, body: fields.Body) -> None:
        """Keep links to exactly the engines in `peers`, each with `id`, `host`, `port`. `id`: of this engine.

        Idempotent. `wait_s`: respond when each link was tried once, or after this time.
        """
        if self._disaggregation is None:
            raise HttpError("this engine has no KV transfers", status=409)
        peers, wait_s = _peers(body), fields.number(body, "wait_s", 0.0, 0.0, LONGEST_WAIT_S)
        links = self._disaggregation.links
        links.me = fields.string(body, "id")
        links.announce(peers)
        if wait_s:
            await links.tried(wait_s)
        await exchange.reply(self._described())

    async def release(self, exchange: Exchange, body: fields.Body) -> None:
        """Release the KV of these requests, kept for another engine or for branches, by the ids that clients sent or
        received. Unknown ids are ignored."""
        names = fields.strings(body, "request_ids", most=MOST_NAMES)
        released = self._disaggregation.free(names) if self._disaggregation is not None else 0
        await exchange.reply({"released": released + self._checkpoints.free(names)})

    async def renew(self, exchange: Exchange, body: fields.Body) -> None:
        """The lease of a request's checkpoint begins again. 404 if it is not here any more."""
        lease_s = fields.number(body, "lease_s", 60.0, 0.1, LONGEST_LEASE_S)
        if not self._checkpoints.renew(fields.string(body, "request_id"), lease_s):
            raise HttpError("there is no checkpoint of this request", "request_id", status=404)
        await exchange.reply({"lease_s": lease_s})

    def _described(self) -> dict[str, object]:
        if self._disaggregation is None:
            return {"id": "", "at": None, "peers": [], "borrows": False}
        host, port = self._disaggregation.at
        links = self._disaggregation.links
        return {
            "id": links.me,
            "at": {"host": host, "port": port},
            "peers": [report._asdict() for report in links.reports()],
            "borrows": self._disaggregation.borrows,
        }


def _peers(body: fields.Body) -> list[Peer]:
    given = body.get("peers")
    if not isinstance(given, list) or len(given) > MOST_PEERS:
        raise HttpError(f"peers must be a list of at most {MOST_PEERS} objects", "peers")
    found = []
    for index, item in enumerate(given):
        where = f"peers[{index}]"
        if not isinstance(item, dict):
            raise HttpError(f"{where} must be an object", where)
        try:
            name, host = fields.string(item, "id"), fields.string(item, "host")
            port = fields.integer(item, "port", low=1, high=65535)
        except HttpError as error:
            raise HttpError(f"{where}.{error}", f"{where}.{error.param}") from None
        if not name or not host or port is None:
            raise HttpError(f"{where} needs id, host and port", where)
        found.append(Peer(name, host, port))
    return found
