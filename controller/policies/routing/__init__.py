"""Routing policies: which instance is tried first. Importing this package registers all of them."""

from controller.policies.routing import best_fit, earliest_maturity, least_outstanding, round_robin

__all__ = ["best_fit", "earliest_maturity", "least_outstanding", "round_robin"]
