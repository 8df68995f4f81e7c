"""Which instance is asked first. Importing this package registers every routing."""

from controller.policies.routing import best_fit, earliest_maturity, least_outstanding, round_robin

__all__ = ["best_fit", "earliest_maturity", "least_outstanding", "round_robin"]
