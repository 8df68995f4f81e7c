"""Reason codes in words. A code without an entry reads as its own words, so nothing is ever hidden."""

from __future__ import annotations

# Causes of a miss, as the gateway records them, and reasons of dispatcher, scaler and people.
REASONS: dict[str, str] = {
    # misses (gateway)
    "queued_too_long": "waited in the queue past its first-token time",
    "slow_first_token": "the engine's first token came late",
    "slow_decode": "tokens came slower than promised",
    "deadline_missed": "the answer ended after its deadline",
    "e2e_missed": "the whole answer took too long (not streamed)",
    "engine_cut": "the engine died during the answer",
    "engine_failed": "the engine failed and no retry was possible",
    # refusals and drops (dispatcher, gateway)
    "slo_infeasible": "refused: no instance could have made it",
    "infeasible_alone": "refused: no instance could have made it",
    "no_capacity": "refused: no instance was up",
    "no_instance": "refused: no instance was up",
    "rate_limit_exceeded": "refused: the tenant's quota was used up",
    "queue_full": "refused: the queue was full",
    "waiting_time_exceeded": "its waiting time ran out in the queue",
    "waiting_time": "its waiting time ran out in the queue",
    "expired": "its waiting time ran out in the queue",
    "expired_hopeless": "its waiting time ran out when its first-token time was already lost",
    "expired_paused": "its waiting time ran out while an operator held it back",
    "expired_without_instance": "its waiting time ran out while no instance was up",
    "cancelled": "cancelled at the engine by the dispatcher",
    "cancelled_by_operator": "a person cancelled it in the queue",
    "internal_error": "the gateway failed to schedule it",
    "no_time_to_retry": "its engine failed, and no time was left to try another",
    # dispatches
    "fits_budget": "fits the engine's room for more",
    "hopeless_spare_budget": "too late to make it, served from what was spare",
    # the way of a KV cache between two instances
    "kv_landed": "its KV cache arrived where it is decoded",
    "kv_lost": "its KV cache was lost: prefilled again",
    "no_room": "the instance that decodes had no room for its KV cache",
    "unreachable": "the other instance could not be reached",
    "transfer_failed": "the transfer failed",
    "link_down": "the link between the two was down",
    "cut": "the transfer was cut off",
    "corrupt": "what arrived was damaged",
    "request_ended": "the request ended first",
    "decode_failed": "the decode instance failed: prefilled again",
    # jobs
    "load_above_upper": "load above the upper threshold",
    "load_below_lower": "load below the lower threshold",
    "telemetry_stale": "what the scaler sees is too old to act on",
    "no_source": "no source gave whole weights",
    "engine_refused": "the engine refused the order",
    "engine_forgot": "the engine was started again and again and forgot the order",
    "instance_not_wanted": "the instance was no longer wanted",
    "stopped_before": "it was stopped before it served",
    "demand_diverged": "one stage has too much to do, the other too little",
    "role_too_low": "the role does not allow it",
}


# Where a request's targets came from.
SOURCES: dict[str, str] = {
    "explicit": "named in the request",
    "class": "those of its class",
    "priority": "mapped from its priority",
    "tenant_default": "those of its tenant's class",
    "defaults": "the common defaults",
}


def reason_in_words(code: str) -> str:
    return REASONS.get(code) or code.replace("_", " ")


def class_name(slo_class: str) -> str:
    """Requests without a class are served on the defaults; that, too, is a row."""
    return slo_class or "no class (defaults)"
