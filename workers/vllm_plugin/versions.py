"""Versions of vLLM whose scheduler the plug-in was tested with. vLLM calls that interface not public: it may change in
any minor release."""

from __future__ import annotations

import re

SUPPORTED = ("0.32",)


class UnsupportedVllm(RuntimeError):
    """This vLLM's scheduler was not tested with the plug-in."""


def check_version(version: str) -> None:
    """Raises UnsupportedVllm."""
    found = re.match(r"\d+\.\d+(?=\.|\+|$)", version)
    if found is None or found[0] not in SUPPORTED:
        known = ", ".join(f"{release}.x" for release in SUPPORTED)
        raise UnsupportedVllm(
            f"Slackline's scheduler supports vLLM {known}, and this is vLLM {version}. Start it without"
            " --scheduler-cls, or install a supported version."
        )
