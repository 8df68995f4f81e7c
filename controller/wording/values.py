"""Values of records that are words of the code, in words."""

from __future__ import annotations

BACKEND_NAMES = {"reference": "Reference engine", "sglang": "SGLang", "vllm": "vLLM"}
SOURCE = {"engine": "another engine's memory", "host": "host memory", "disk": "disk"}  # of weights
ORDERING_WORDS = {  # which waiting request is considered first
    "apparent_tardiness_cost": "most worth for its time, the closer its deadline the more",
    "calm": "most worth per second of generation on each instance, ranked again each frame",
    "deadline_aware_edf": "earliest deadline; those whose deadline has passed last",
    "earliest_deadline_first": "earliest deadline",
    "feasible_deadlines": "earliest deadline, among requests that can all be in time; then the others by worth",
    "first_come_first_served": "longest wait",
    "learned_rank": "shortest answer, as a predictor with a set error ranks them",
    "least_attained_service": "workflow that was served least",
    "shortest_job_first": "shortest time to serve",
    "slack_aware_edf": "earliest deadline, among requests that can still be in time; then the others, latest first",
    "tpot_then_arrival": "tightest TPOT, then longest wait",
}
REQUEST_TYPES = {"latency": "Latency", "deadline": "Deadline", "compound": "Compound", "best_effort": "Best effort"}
# Why a transfer was not scheduled on its shared link.
UNSCHEDULED = {
    "unavailable": "no transfer daemon was running",
    "no_answer": "the transfer daemon did not answer",
    "silent": "the transfer daemon stopped responding",
    "lost": "the connection to the transfer daemon was lost",
    "expired": "the engine stopped reporting its progress",
    "refused": "the transfer daemon refused it",
    "held_too_long": "it was held for 20 s",
    "off": "the flow policy was just switched off",
}
# By key of a figure.
VALUES: dict[str, dict[str, str]] = {
    "history": {
        "history": "recent measurements of its level",
        "no_history": "initial values of its level (no measurements)",
    },
    "contention": {
        "strict": "always those of each level",
        "relax_to_next_higher": "those of the next more urgent level while no more urgent request is waiting",
        "relax_to_zero": "none while no more urgent request is waiting",
    },
    "flow_policy": {
        "off": "off: all send at once",
        "mfs": "MFS: promoted near the deadline",
        "earliest_deadline": "earliest deadline first",
        "shortest_first": "shortest first",
        "fair_sharing": "fair sharing",
    },
    "flow": {reason: f"unscheduled: {words}" for reason, words in UNSCHEDULED.items()},
    "stage_deadlines": {
        "share_of_rest": "shares of the time left",
        "accumulated": "fixed due times",
        "own_share": "fixed lengths",
    },
    "shared_by": {
        "steps_left": "the steps left",
        "stages": "the stages of the workflow",
        "graph": "a recorded workflow like it",
        "last": "nothing known, so all of the time left",
    },
    "ended": {"all": "sent for all", "stopped": "stopped by the operator", "redis_away": "Redis became unavailable"},
    "kind": SOURCE,
    "source": SOURCE,
    "judged_by": {"tokens": "token times", "e2e": "end-to-end time (not streamed)"},
    "field": {
        "target_ttft": "TTFT target",
        "target_tbt": "TPOT target",
        "deadline": "deadline",
        "thinking_deadline": "thinking deadline",
    },
}
