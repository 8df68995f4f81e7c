"""A sweep of each system's own settings, at a moderate and a high load; comparisons use each system's best."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import Progress, Table, Value
from benchmarks.reproduce.concord.lab import (
    AUTELLIX,
    BY_CLASS,
    CONCORD,
    EDF,
    LTR,
    NEVER,
    SARATHI,
    SJF,
    VLLM,
    WHOLE_SLOTS,
    Case,
    System,
    run,
)

LOADS = (2.0, 4.0)
SECONDS, SEED = (
    300.0,
    77,
)  # seconds of arrivals; half of it would be too short to show the cost of a queue that only grows

TITLE = "Concord: every system's own settings, swept"
STORED = Path(__file__).resolve().parents[3] / "docs" / "reproduction" / "concord.json"


def choices() -> dict[str, list[System]]:
    """Candidates by system. The comparison uses seeds that the sweep does not."""
    return {
        CONCORD.name: [
            *(CONCORD.variant(slots=slots) for slots in (80, 96, 112, 128)),
            CONCORD.variant(settings={"rectangles": True, "commit": 1.0}),
            CONCORD.variant(settings={"rectangles": True, "late_below": 1.0}),
            CONCORD.variant(history=1.25),
            CONCORD.variant(history=1.75),
        ],
        WHOLE_SLOTS.name: [WHOLE_SLOTS.variant(slots=slots) for slots in (80, 96, 128)],
        LTR.name: [
            *(LTR.variant(slots=slots, settings={"promote_steps": NEVER}) for slots in (96, 128, 160)),
            LTR.variant(settings={"promote_steps": 4000}),
            LTR.variant(settings={"promote_steps": NEVER, "preempt": False}),
        ],
        AUTELLIX.name: [
            *(AUTELLIX.variant(slots=slots) for slots in (128, 192, 256)),
            AUTELLIX.variant(settings={"quantum_steps": 512}),
            AUTELLIX.variant(settings={"starvation": 4.0}),
        ],
        SARATHI.name: [
            *(SARATHI.variant(slots=slots) for slots in (128, 256)),
            SARATHI.variant(budget=1024),
            SARATHI.variant(budget=2048),
        ],
        VLLM.name: [VLLM.variant(slots=128), VLLM, VLLM.variant(budget=8192)],
        EDF.name: [
            *(EDF.variant(slots=slots) for slots in (96, 192)),
        ],
        SJF.name: [SJF.variant(slots=slots) for slots in (96, 128, 160)],
        BY_CLASS.name: [BY_CLASS.variant(slots=128), BY_CLASS],
    }


def stored_best(name: str = CONCORD.name, file: Path = STORED) -> System:
    """A system with the settings that earned most in the stored sweep. Raises RuntimeError if there is none."""
    tables = json.loads(file.read_text())["tables"] if file.exists() else ()
    rows: list[list[Any]] = next((table["rows"] for table in tables if table["title"] == TITLE), [])
    earned = {row[1]: statistics.fmean(row[2:]) for row in rows if row[0] == name}
    known = [system for system in choices()[name] if system.text in earned]
    if not known:
        raise RuntimeError(f"no sweep of {name} is stored: run --paper concord first")
    return max(known, key=lambda system: earned[system.text])


def best(quick: bool, progress: Progress) -> tuple[Mapping[str, System], Table]:
    """The best settings of each by token goodput over both loads, and the whole sweep."""
    found: dict[str, System] = {}
    rows: list[Sequence[Value]] = []
    for name, candidates in choices().items():
        scores: list[float] = []
        for system in candidates[:1] if quick else candidates:
            earned = [
                run(system, Case(rate, 60 if quick else round(rate * SECONDS), SEED)).tokens_per_s for rate in LOADS
            ]
            scores.append(statistics.fmean(earned))
            rows.append([name, system.text, *(round(each) for each in earned)])
            progress(f"sweep: {name}, {system.text}: {', '.join(f'{each:.0f}' for each in earned)}")
        found[name] = candidates[max(range(len(scores)), key=lambda index: (scores[index], -index))]
    columns = ["system", "settings", *(f"goodput tokens/s at {rate:g}/s" for rate in LOADS)]
    return found, Table(TITLE, columns, rows)


def finite(value: float) -> float | None:
    """For tables: no figure for what never came."""
    return round(value, 2) if math.isfinite(value) else None
