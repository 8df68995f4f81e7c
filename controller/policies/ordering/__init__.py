"""Ordering policies: in which order queued requests are considered. Importing this package registers all of them."""

from controller.policies.ordering import (
    apparent_tardiness_cost,
    calm,
    deadline_aware_edf,
    earliest_deadline_first,
    feasible_deadlines,
    first_come_first_served,
    learned_rank,
    least_attained_service,
    shortest_job_first,
    slack_aware_edf,
    tpot_then_arrival,
)

__all__ = [
    "apparent_tardiness_cost",
    "calm",
    "deadline_aware_edf",
    "earliest_deadline_first",
    "feasible_deadlines",
    "first_come_first_served",
    "learned_rank",
    "least_attained_service",
    "shortest_job_first",
    "slack_aware_edf",
    "tpot_then_arrival",
]
