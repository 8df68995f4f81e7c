"""In which order queued requests are considered. Importing this package registers every ordering."""

from controller.policies.ordering import (
    apparent_tardiness_cost,
    earliest_deadline_first,
    first_come_first_served,
    tpot_then_arrival,
)

__all__ = [
    "apparent_tardiness_cost",
    "earliest_deadline_first",
    "first_come_first_served",
    "tpot_then_arrival",
]
