"""Reason codes in words. A code without an entry reads as its own words, so nothing is ever hidden."""

from __future__ import annotations

DASH = "–"
MINUS = "−"

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
    "unattainable_in_queue": "refused: it could not make it behind those that wait before it",
    "no_capacity": "refused: no instance was up",
    "no_instance": "refused: no instance was up, and none was on its way",
    "starts_too_late": "refused: no instance was up, and the next would start too late for it",
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
    "prefilled": "its prompt is computed, its first token known",
    # where a decode stage goes
    "fits_tpot": "fits the pace that the instance keeps for the others",
    "hopeless_harmless": "too late to make it, where it slows nobody down",
    "held_too_long": "waited too long for a better place",
    "least_outstanding": "the instance with the least to do",
    "round_robin": "the next instance in turn",
    "no_decode_instance": "no instance that decodes was up: prefilled again by one that does both, or given up",
    "migrator_failed": "an internal error between the two stages: prefilled again",
    # the way of a KV cache between two instances
    "kv_landed": "its KV cache arrived where it is decoded",
    "kv_lost": "its KV cache was lost: prefilled again",
    "no_room": "the instance that decodes had no room for its KV cache",
    "unreachable": "the other instance could not be reached",
    "transfer_failed": "the transfer failed",
    "link_down": "the link between the two was down",
    "answers_again": "it answers again",
    "cut": "the transfer was cut off",
    "corrupt": "what arrived was damaged",
    "request_ended": "the request ended first",
    "decode_failed": "the decode instance failed: prefilled again",
    "prefill_failed": "its prefill instance failed: both stages begin again",
    "refused": "the instance that decodes refused it",
    # jobs
    "load_above_upper": "load above the upper threshold",
    "load_below_lower": "load below the lower threshold",
    "telemetry_stale": "what the scaler sees is too old to act on",
    "below_min": "fewer than the policy's least",
    "above_max": "more than the policy's most",
    "at_max": "the policy's most is reached",
    "settling": "the last change has not settled",
    "relieved": "the load is between the thresholds again",
    "rest_would_exceed_upper": "the others would be above the upper threshold",
    "nothing_to_start": "there is no instance of ours to start another like",
    "nothing_to_stop": "every instance is run by somebody else",
    "pool_below_target": "the warm pool has fewer than the policy wants",
    "pool_above_target": "the warm pool has more than the policy wants",
    "starting": "its process was started",
    "healthy": "it answers",
    "new_run": "it was started again",
    "no_answer": "nothing answers there",
    "exited": "its process ended",
    "start_timeout": "it was not ready in time",
    "drained": "it had nothing left to do",
    "drain_timeout": "it was still busy when its time to drain was over",
    "ended_while_draining": "it ended while it drained",
    "stopped": "it was stopped",
    "switched": "the engine took the role",
    "not_prepared": "the engine tried the change of role dry and refused it",
    "unsafe_to_restore": "the engine cannot serve in its old role either",
    "not_enabled": "the engine was not started with its role switch",
    "no_such_switch": "the engine switches between prefill and decode only",
    "transfer_backend": "what moves the engine's KV cache cannot change sides",
    "connection_lost": "the engine was lost while it switched",
    "no_effect": "the engine was told again and again, without effect",
    "person_asked": "asked for by a person",
    "present_already": "the weights were there already",
    "no_source": "no source gave whole weights",
    "engine_refused": "the engine refused the order",
    "engine_forgot": "the engine was started again and again and forgot the order",
    "instance_not_wanted": "the instance was no longer wanted",
    "stopped_before": "it was stopped before it served",
    "slept_before": "it was put to sleep before it served",
    "no_sleep_mode": "the server has no sleep mode",
    "stays_awake": "the engine was told and stays awake",
    "stays_asleep": "the engine was told and stays asleep",
    "asleep_otherwise": "the engine sleeps at another level already",
    "reload_failed": "the engine could not read its weights again",
    "reload_lost": "the engine went away while it read its weights",
    "demand_diverged": "one stage has too much to do, the other too little",
    "role_too_low": "the role does not allow it",
    "csrf_failed": "the form could not be trusted",
    "not_signed_in": "nobody was signed in",
    "invalid_api_key": "the API key is unknown, expired or revoked",
    "scope_missing": "the API key may not read",
    "keys_change_nothing": "a tenant's key changes nothing",
    "older_than_kept": "they were older than what is kept",
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
