"""Instances and launch templates."""
