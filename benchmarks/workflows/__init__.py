"""Workflows of Concord's three types on real vLLM, with live dependencies: the parts of `make bench-workflows`."""
