"""Proof that a caller knows the fleet's token, which never travels.

A keyed hash is shown in its place. It covers the other side's nonce, so it is of use once; the purpose, so that a proof
for one thing is none for another; and the address that the caller meant. The last part matters most: whoever registers
an instance is called by the fleet, and could pass on to another engine what that one asks and what the fleet answers.
An engine accepts only proofs for its own addresses, so whatever is heard at one address is of no use at another.

Calls over HTTP: the caller gets a challenge (`GET /fleet/challenge`) and sends it back in the headers below, with a
proof over method, target and body. KV connections and weight transfers have greetings of their own with the same
functions (`workers.engine.kv.wire`, `workers.engine.torch.weights.meeting`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import urlsplit

from controller.core.errors import SlacklineError
from workers.environment import read_variable

CHALLENGE_PATH = "/fleet/challenge"
PROOF, CHALLENGE, TO = "x-slackline-proof", "x-slackline-challenge", "x-slackline-to"
KEY_VARIABLE = "ENGINE_API_KEY"  # from which a reference engine takes its own key
LIVES_S = 30.0  # of a challenge
LONGEST = 200  # characters of a challenge that is looked at
_PORTS = {"http": 80, "https": 443}


class NoChallenge(SlacklineError):
    """What answers accepts no proofs: another program, or an engine of an older version. Nothing else was sent."""


def fleet_token() -> str:
    """The fleet's token, read from where engines read it too. "" without one. Raises ConfigError."""
    return _read(os.environ.get("FLEET_TOKEN_FILE", ""), os.environ.get("FLEET_TOKEN", ""))


@lru_cache(maxsize=8)
def _read(path: str, value: str) -> str:
    """Read once: it is needed in the gateway's event loop."""
    return read_variable({"FLEET_TOKEN_FILE": path, "FLEET_TOKEN": value}, "FLEET_TOKEN")


def keyed(token: str, purpose: str, *parts: str | bytes) -> str:
    """The keyed hash of the parts, in hex. Each part has its length before it, so that no two lists are the same."""
    found = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in ("slackline", purpose, *parts):
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "big") + raw)
    return found.hexdigest()


def proves(shown: object, token: str, purpose: str, *parts: str | bytes) -> bool:
    """Whether `shown` is the keyed hash of the parts. Nothing proves the empty token."""
    if not isinstance(shown, str) or not token:
        return False
    return hmac.compare_digest(shown.encode(), keyed(token, purpose, *parts).encode())


def made_key(token: str, instance: str) -> str:
    """The API key of an engine that Slackline starts; "" without a fleet's token."""
    return keyed(token, "engine key", instance) if token else ""


def authority(url: str) -> str:
    """Host and port of an instance's URL, as both sides of a call write them. Raises ValueError."""
    split = urlsplit(url)
    return address(split.hostname or "", split.port or _PORTS.get(split.scheme, 80))


def address(host: str, port: int) -> str:
    return f"[{host.lower()}]:{port}" if ":" in host else f"{host.lower()}:{port}"


def challenge_in(answer: bytes, status: int, url: str) -> str:
    """The challenge in what the server at `url` answered to `GET /fleet/challenge`. Raises NoChallenge."""
    try:
        challenge = json.loads(answer)["challenge"] if status == HTTPStatus.OK else None
    except (ValueError, KeyError, TypeError):
        challenge = None
    if not isinstance(challenge, str):
        raise NoChallenge(f"{url} gave no challenge (status {status}): it is no engine of this version")
    return challenge


def call_headers(token: str, challenge: str, url: str, method: str, target: str, body: bytes) -> dict[str, str]:
    """The headers of a call to the engine at `url`. `target`: path and query behind it."""
    to = authority(url)
    proof = keyed(token, "call", challenge, to, method, target, body)
    return {"Content-Type": "application/json", CHALLENGE: challenge, TO: to, PROOF: proof}


class Challenges:
    """The challenges of one process, each good for one call. Only those of calls with a right proof are remembered, so
    that nobody can fill the memory by asking for many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_hex(32)
        self._used: dict[str, float] = {}

    def issue(self) -> str:
        """A new challenge: when it was made, and a random number, with a keyed hash that shows that it is ours."""
        told = f"{self._clock():.3f}-{secrets.token_hex(16)}"
        return f"{told}-{keyed(self._secret, 'challenge', told)}"

    def valid(self, challenge: str) -> bool:
        """Whether it is ours, of the last LIVES_S, and not used yet."""
        if len(challenge) > LONGEST or challenge in self._used:
            return False
        told, _, shown = challenge.rpartition("-")
        if not told or not proves(shown, self._secret, "challenge", told):
            return False
        return self._clock() - float(told.partition("-")[0]) <= LIVES_S

    def use(self, challenge: str) -> None:
        now = self._clock()
        self._used = {known: due for known, due in self._used.items() if due > now}
        self._used[challenge] = now + LIVES_S
