"""Versions of vLLM with which the plug-in and the connector were tested. vLLM calls the interface of its scheduler not
public and that of connectors experimental: either may change in any minor release."""

from __future__ import annotations

import re

SUPPORTED = ("0.32",)


class UnsupportedVllm(RuntimeError):
    """Slackline's part was not tested with this vLLM."""


def check_version(version: str, part: str = "scheduler", option: str = "--scheduler-cls") -> None:
    """`option`: the one without which the server starts without this part. Raises UnsupportedVllm."""
    found = re.match(r"\d+\.\d+(?=\.|\+|$)", version)
    if found is None or found[0] not in SUPPORTED:
        known = ", ".join(f"{release}.x" for release in SUPPORTED)
        raise UnsupportedVllm(
            f"Slackline's {part} supports vLLM {known}, and this is vLLM {version}. Start it without"
            f" {option}, or install a supported version."
        )
