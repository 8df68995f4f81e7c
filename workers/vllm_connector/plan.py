"""Which KV this server offers and which it loads: the half of the connector in vLLM's scheduler. Knows nothing of vLLM.

An offer travels in `kv_transfer_params`: the prefill server's answer has it, and the gateway sends it to the decode
server. It names the KV by a secret of its own, made for this one transfer, so nobody who knows another request's id
gets that request's KV. The server that decodes compares the prompt's digest, or it would continue another prompt.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from workers.http.fleet_proof import address
from workers.vllm_connector.settings import ConnectorSettings

SECRET_LENGTH = 32  # hex digits of 16 random bytes
MOST_TOKENS = 1 << 30
log = logging.getLogger(__name__)


class PromptOffer(NamedTuple):
    """Where the KV of a prompt waits. `tokens`: of the prompt, all of which are computed."""

    host: str
    port: int
    secret: str
    tokens: int
    prompt: str

    def as_params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": self.host,
            "remote_port": self.port,
            "slackline_kv": self.secret,
            "slackline_tokens": self.tokens,
            "slackline_prompt": self.prompt,
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """KV that waits to be loaded. Its blocks belong to the request until the worker has reported it as sent."""

    secret: str
    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvLoad:
    """KV to load into `blocks`, from the prompt's block number `start` on. `due`: wall clock, seconds; None without a
    deadline."""

    request_id: str
    offer: PromptOffer
    start: int
    blocks: tuple[int, ...]
    due: float | None = None


class RefusedOffer(NamedTuple):
    """An offer by whose secret no KV was asked for, and why, for people."""

    secret: str
    why: str


@dataclass(slots=True)
class KvOrders:
    """What the scheduler's side tells the worker's with a step. `unwanted`: offers whose KV nobody will load.
    `refused`: offers that were wrong. `kv_usage`: the share of blocks in use."""

    kept: list[Kept] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    unwanted: list[PromptOffer] = field(default_factory=list)
    refused: list[RefusedOffer] = field(default_factory=list)
    kv_usage: float = 0.0


class KvPrompt(NamedTuple):
    """A request as far as it matters here. `due`: see KvLoad."""

    request_id: str
    token_ids: Sequence[int]
    params: Mapping[str, Any] | None
    about: tuple[str, ...] = ()  # what else its KV depends on: images, the adapter
    due: float | None = None


def digest(prompt: KvPrompt) -> str:
    """Of all that the prompt's KV depends on, as far as requests of one model differ."""
    found = hashlib.sha256(array("q", prompt.token_ids).tobytes())
    for each in prompt.about:
        found.update(len(each).to_bytes(4, "big") + each.encode())
    return found.hexdigest()


class TransferPlan:
    """`block_tokens`: tokens of a KV block. `produces`, `consumes`: vLLM's `kv_role`."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_tokens: int,
        *,
        produces: bool = True,
        consumes: bool = True,
        secret: Callable[[], str] = lambda: secrets.token_hex(SECRET_LENGTH // 2),
    ) -> None:
        self._settings, self._block_tokens = settings, block_tokens
        self._produces, self._consumes = produces, consumes
        self._secret = secret
        self._offers: dict[str, PromptOffer | None] = {}  # by request, read once
        self._asked: set[str] = set()  # requests whose offer was used: a lost load is computed
        self._orders = KvOrders()

    # ---- the server that decodes ------------------------------------------------------------------------------------

    def to_load(self, prompt: KvPrompt, computed: int) -> int:
        """Tokens that can be loaded beyond the first `computed` ones, which are in the prefix cache. May be asked again
        and changes nothing. vLLM computes the last token in any case, so a load of that alone is not worth a wait."""
        offer = self._offer(prompt)
        missing = offer.tokens - computed if offer is not None else 0
        return missing if missing > 1 else 0

    def allocated(self, prompt: KvPrompt, blocks: Sequence[int], loaded: int) -> None:
        """The request has `blocks`, and the last `loaded` tokens of its prompt are loaded."""
        offer = self._offer(prompt)
        if offer is None:
            return
        self._asked.add(prompt.request_id)
        if loaded <= 0:
            self._orders.unwanted.append(offer)
            return
        start, stop = (offer.tokens - loaded) // self._block_tokens, self._blocks_of(offer.tokens)
        self._orders.loads.append(KvLoad(prompt.request_id, offer, start, tuple(blocks[start:stop]), prompt.due))

    def _offer(self, prompt: KvPrompt) -> PromptOffer | None:
        """That the request brought and that was not used yet. One that is wrong is logged and told once, and its prompt
        computed. Without a secret there is none whom it could be told."""
        name = prompt.request_id
        if name in self._asked or not prompt.params or not prompt.params.get("do_remote_prefill"):
            return None
        if name not in self._offers:
            try:
                self._offers[name] = self._read(prompt)
            except ValueError as error:
                log.warning("the KV of %s is computed here: %s", name, error)
                self._offers[name] = None
                if _is_secret(secret := prompt.params.get("slackline_kv")):
                    self._orders.refused.append(RefusedOffer(secret, str(error)))
        return self._offers[name]

    def _read(self, prompt: KvPrompt) -> PromptOffer:
        """Raises ValueError."""
        if not self._consumes:
            raise ValueError("this server loads no KV")
        given = prompt.params or {}
        host, port = given.get("remote_host"), given.get("remote_port")
        secret, tokens = given.get("slackline_kv"), given.get("slackline_tokens")
        if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int):
            raise ValueError("its offer has no address")
        if address(host, port) not in self._settings.peers:
            raise ValueError(f"{address(host, port)} is none of the peers of this server")
        if not _is_secret(secret):
            raise ValueError("its offer is not one of this connector")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= MOST_TOKENS:
            raise ValueError("its offer has no number of tokens")
        if tokens != len(prompt.token_ids) or given.get("slackline_prompt") != digest(prompt):
            raise ValueError("its offer is of another prompt")
        return PromptOffer(host, port, secret, tokens, digest(prompt))

    # ---- the server that prefills -----------------------------------------------------------------------------------

    def finished(self, prompt: KvPrompt, blocks: Iterable[int], *, by_length: bool) -> PromptOffer | None:
        """The request has ended. Its offer, if its KV is wanted elsewhere; its blocks must then stay. `by_length`: it
        has its one token, and nothing but that ended it."""
        self._offers.pop(prompt.request_id, None)
        self._asked.discard(prompt.request_id)
        if not self._produces or not by_length or not (prompt.params or {}).get("do_remote_decode"):
            return None
        held = tuple(blocks)[: self._blocks_of(len(prompt.token_ids))]
        if not held or len(held) < self._blocks_of(len(prompt.token_ids)):
            return None
        offer = PromptOffer(
            self._settings.host, self._settings.port, self._secret(), len(prompt.token_ids), digest(prompt)
        )  # fmt: skip
        self._orders.kept.append(Kept(offer.secret, prompt.request_id, held))
        return offer

    # ---- both -------------------------------------------------------------------------------------------------------

    def orders(self, kv_usage: float) -> KvOrders:
        """All since the last call."""
        found, self._orders = self._orders, KvOrders()
        found.kv_usage = kv_usage
        return found

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)


def _is_secret(given: object) -> TypeGuard[str]:
    return isinstance(given, str) and len(given) == SECRET_LENGTH
