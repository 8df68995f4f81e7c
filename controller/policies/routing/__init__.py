"""Which instance is asked first. Importing this package registers every routing."""

from controller.policies.routing import earliest_maturity, least_outstanding, round_robin

__all__ = ["earliest_maturity", "least_outstanding", "round_robin"]
