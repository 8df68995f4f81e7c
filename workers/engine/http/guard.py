"""Protects the endpoints that move KV or weights, or stop the engine: callers must prove that they know the fleet's
token (`workers.http.fleet_proof`), which they never send."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable

from workers.engine import fields
from workers.engine.errors import HttpError
from workers.engine.http.asgi import BodyRoom, Exchange, Handler, json_object
from workers.http.details import LIVE
from workers.http.fleet_proof import CHALLENGE, CHALLENGE_PATH, PROOF, TO, Challenges, address, proves

FleetHandler = Callable[[Exchange, fields.Body], Awaitable[None]]

CALL_BYTES = 1 << 20  # of the body of a guarded call: plans and lists of names, never prompts
# Of all such bodies that are being read. Anybody gets a challenge, and a proof can be checked only with the whole body.
CALLS_BYTES = 16 << 20

# Probes of hosts ask these without a key, and what is guarded by a proof needs no other one.
WITHOUT_KEY = (LIVE, "/health", "/ping", CHALLENGE_PATH)


class FleetGuard:
    """Checks proofs of the fleet's token, and the engine's own key. `hosts`: the names of this engine; its port is that
    of the connection. `urls`: further addresses (`workers.http.fleet_proof.authority`) under which it is registered,
    behind a proxy. `key`: that callers must send as a bearer token where no proof is needed; "": nobody needs one."""

    def __init__(self, token: str, hosts: Iterable[str] = (), urls: Iterable[str] = (), key: str = "") -> None:
        self._token = token
        self._hosts = tuple(hosts)
        self._urls = tuple(urls)
        self._challenges = Challenges()
        self._key = key
        self.proved: set[Handler] = set()
        self.room = BodyRoom(CALLS_BYTES)

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {CHALLENGE_PATH: {"GET": self.challenge}}

    async def challenge(self, exchange: Exchange) -> None:
        """Return a challenge, which the proof of one call must contain."""
        await exchange.reply({"challenge": self.issue()})

    def issue(self) -> str:
        return self._challenges.issue()

    def __call__(self, handler: FleetHandler) -> Handler:
        """A handler that calls `handler` with the body if the call has a proof. Otherwise the response is 403, before
        any field is read."""

        async def check(exchange: Exchange) -> None:
            self._calls(exchange)  # first, so that nothing is read for a call that cannot have a right proof
            raw = await exchange.body(CALL_BYTES, self.room)
            self.check(exchange, raw)
            await handler(exchange, json_object(raw, empty=True))

        self.proved.add(check)
        return check

    def admit(self, exchange: Exchange, handler: Handler) -> None:
        """Raises HttpError 401 unless the call has this engine's key, needs none, or has a proof in its place."""
        if not self._key or exchange.path in WITHOUT_KEY or handler in self.proved:
            return
        scheme, _, shown = exchange.header("authorization").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(shown.encode("latin-1"), self._key.encode()):
            return
        if exchange.method == "GET" and exchange.header(PROOF):  # of an engine that looks for weights
            self.check(exchange, b"")
            return
        raise HttpError("the key of this engine is missing or wrong", "authorization", status=401)

    def check(self, exchange: Exchange, body: bytes) -> None:
        """Raises HttpError 403. An engine without a token accepts no proof."""
        shown, challenge, to = self._calls(exchange)
        if not proves(shown, self._token, "call", challenge, to, exchange.method, exchange.target, body):
            raise HttpError("the proof of the fleet's token is wrong", PROOF, status=403)
        self._challenges.use(challenge)

    def _calls(self, exchange: Exchange) -> tuple[str, str, str]:
        """(proof, challenge, address) of the call. Raises HttpError 403 unless the last two are right."""
        if not self._token:
            raise HttpError("this engine was started without FLEET_TOKEN", PROOF, status=403)
        shown, challenge, to = (exchange.header(name) for name in (PROOF, CHALLENGE, TO))
        if not shown:
            raise HttpError("a proof of the fleet's token is missing", PROOF, status=403)
        if not self._challenges.valid(challenge):
            raise HttpError("the challenge is not of this engine, used, or too old", CHALLENGE, status=403)
        names = self._names(exchange)
        if to not in names:
            told = f"the call is for {to[:100]!r}, and this engine is {' or '.join(names)} (--advertise-url)"
            raise HttpError(told, TO, status=403)
        return shown, challenge, to

    def _names(self, exchange: Exchange) -> list[str]:
        """Every address that is this engine's alone. On loopback, also by name."""
        host, port = exchange.local
        hosts = (host, *self._hosts, *(("localhost",) if host in ("127.0.0.1", "::1") else ()))
        return [*dict.fromkeys(address(each, port) for each in hosts), *self._urls]
