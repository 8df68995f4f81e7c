"""Reason codes in words. A code without an entry reads as its own words, so nothing is ever hidden."""

from __future__ import annotations

# Causes of a miss, as the gateway records them, and reasons of dispatcher, scaler and people.
REASONS: dict[str, str] = {
    "queue": "waited in the queue past its first-token time",
    "queued_too_long": "waited in the queue past its first-token time",
    "queue_wait": "waited in the queue past its first-token time",
    "prefill": "prefill on the engine was slower than predicted",
    "slow_prefill": "prefill on the engine was slower than predicted",
    "slow_first_token": "the engine's first token came late",
    "ttft": "the first token came late",
    "ttft_missed": "the first token came late",
    "tpot": "tokens came slower than promised",
    "tpot_missed": "tokens came slower than promised",
    "slow_decode": "tokens came slower than promised",
    "decode": "tokens came slower than promised",
    "deadline": "the answer ended after its deadline",
    "deadline_missed": "the answer ended after its deadline",
    "e2e": "the whole answer took too long (not streamed)",
    "e2e_missed": "the whole answer took too long (not streamed)",
    "refused": "refused on arrival",
    "slo_infeasible": "refused: no instance could have made it",
    "no_capacity": "refused: no instance was up",
    "rate_limit_exceeded": "refused: the tenant's quota was used up",
    "queue_full": "refused: the queue was full",
    "expired": "its waiting time ran out in the queue",
    "waiting_time_exceeded": "its waiting time ran out in the queue",
    "failed": "the engine failed and no retry was possible",
    "engine_failed": "the engine failed and no retry was possible",
    "cut": "the engine died during the answer",
    "engine_cut": "the engine died during the answer",
    "hopeless": "became hopeless while it waited",
}

OUTCOMES: dict[str, tuple[str, str]] = {
    "ok": ("answered", "ok"),
    "refused": ("refused", "bad"),
    "expired": ("expired in the queue", "bad"),
    "failed": ("failed", "bad"),
    "cut": ("cut off", "bad"),
    "cancelled": ("cancelled by its client", "idle"),
}


def reason_in_words(code: str) -> str:
    return REASONS.get(code) or code.replace("_", " ")


def class_name(slo_class: str) -> str:
    """Requests without a class are served on the defaults; that, too, is a row."""
    return slo_class or "no class (defaults)"
