"""Writes of the fleet: hosts, instances, actions on them, links and transfers between them, scaling."""
