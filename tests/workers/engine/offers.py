"""Offers as an engine of the fleet makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.workers.engine.process import FLEET
from workers.engine.kv.transfer import Offer


def fleet_offer(host: str, port: int, request: str, *named: Any, token: str = "t") -> Offer:
    """`token`: the fleet's."""
    return replace(Offer(host, port, request, *named), proof=Offer.proof_of(token, host, port, request))


def signed(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a decode request as if an engine of the tests' fleet had made them for this address."""
    proof = Offer.proof_of(FLEET["token"], params["remote_host"], params["remote_port"], params["remote_request_id"])
    return {**params, "remote_proof": proof}
