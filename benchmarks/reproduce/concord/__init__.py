"""Concord's figures."""
