"""Where on a cluster an engine runs: the cluster's name, the resources that it takes, the labels of its node. They are
part of the `spec` of a launch template or of an instance."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

DEFAULT_CLUSTER = "default"
CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
MOST, LONGEST = 32, 120  # of resources and labels; characters of a name
FIELDS = ("cluster", "resources", "labels")
CPUS, GPUS, MEMORY = "CPU", "GPU", "memory"  # names of resources that Ray knows itself; memory is in bytes


def dashboards(addresses: str) -> list[tuple[str, str]]:
    """Name and URL of each cluster in RAY_ADDRESS, which is one URL, of the cluster `default`, or `name=URL` for each,
    separated by commas. The URLs are not checked."""
    found = []
    for entry in filter(None, map(str.strip, addresses.split(","))):
        name, url = entry.split("=", 1) if CLUSTER.fullmatch(entry.partition("=")[0]) else (DEFAULT_CLUSTER, entry)
        found.append((name, url.strip()))
    return found


def problems(spec: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with the placement in a spec, by field. Empty if nothing is."""
    found = {}
    cluster = spec.get("cluster", DEFAULT_CLUSTER)
    if not (isinstance(cluster, str) and CLUSTER.fullmatch(cluster)):
        found["cluster"] = "Must be the name of a cluster: letters, digits and . _ - (at most 32)."
    if not (_named(spec.get("resources", {})) and all(map(_amount, spec.get("resources", {}).values()))):
        told = f"Must be an object of at most {MOST} amounts above 0 by name, such as"
        found["resources"] = f'{told} {{"GPU": 1, "CPU": 4}}.'
    if not (_named(spec.get("labels", {})) and all(map(_text, spec.get("labels", {}).values()))):
        found["labels"] = f'Must be an object of at most {MOST} texts by name, such as {{"zone": "a"}}.'
    return found


def _named(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) <= MOST and all(map(_text, value))


def _text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST


def _amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
