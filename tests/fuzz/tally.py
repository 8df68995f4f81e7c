"""How much is tried, and what came of it: the last line of `make fuzz`."""

from __future__ import annotations

import json
import os
from collections import Counter

QUICK = bool(os.environ.get("QUICK"))
SCALE = 1 if QUICK else 12  # the same targets, more cases of each
CASES: Counter[tuple[str, str]] = Counter()
FAULTS: dict[str, list[str]] = {"server_errors": [], "undocumented": [], "crashes": []}


def tried(target: str, role: str = "") -> None:
    CASES[target, role] += 1


def fault(kind: str, what: str) -> None:
    """Kinds: an answer of 500, an answer that the schema does not have, an error that no caller expects."""
    FAULTS[kind].append(what[:600])


def faults_of(kind: str, since: int) -> list[str]:
    return FAULTS[kind][since:]


def line() -> str:
    cases: dict[str, dict[str, int]] = {}
    for (target, role), count in sorted(CASES.items()):
        cases.setdefault(target, {})[role or "all"] = count
    found = {kind: len(each) for kind, each in FAULTS.items()}
    return json.dumps({"cases": cases, "total": sum(CASES.values()), **found})
