"""Figures of other sections that the combined set's section uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import SET, Claim, Progress, Section, Table
from benchmarks.reproduce.combined.pairs import short
from benchmarks.reproduce.concord.lab import CONCORD, WHOLE_SLOTS, System
from benchmarks.reproduce.concord.sweep import choices
from benchmarks.reproduce.hyperflexis.setting import OURS

STORE = Path(__file__).resolve().parents[3] / "docs" / "reproduction"
KNEE = "90 % point, requests/s"
COUNTED = (
    "a second counts if the mean TTFT of each class meets its target. Above the capacity of one worker some "
    "requests miss: the set postpones P1, whose answers are the longest, and some of P3, and HyperFlexis P2 "
    "and more of P3; of all requests the set attains {ours:.3f}, HyperFlexis {theirs:.3f}"
)


def stored(paper: str, folder: Path = STORE) -> Section | None:
    file = folder / f"{paper}.json"
    return Section.from_json(json.loads(file.read_text())) if file.exists() else None


def from_the_report(progress: Progress, reason: str, folder: Path = STORE) -> Iterator[Claim]:
    """HyperFlexis' Fig. 5 to 7; empty if its section was not run."""
    section = stored("hyperflexis", folder)
    if section is None:
        progress("HyperFlexis' section is not stored: its Figures 5 to 7 are left out")
        return
    for table in section.tables:
        if table.title.startswith("Fig. 5"):
            yield from _mapped(table, reason)
        elif table.title.startswith("Fig. 7, ") and KNEE in table.columns:
            yield _alone(table, reason)
    totals = _totals(section.tables)
    shares = {OURS.index(name): claim for claim in section.claims for name in OURS if _sixth(claim, name)}
    if len(shares) == len(OURS):
        ours, theirs = shares[0], shares[1]
        why = COUNTED.format(ours=totals[OURS[0]], theirs=totals[OURS[1]])
        yield _beside(
            "share of seconds in which P0 to P2 keep their TTFT", f"Fig. 6: {ours.setting}", theirs.ours, ours.ours, why
        )


def _sixth(claim: Claim, name: str) -> bool:
    return claim.figure == "Fig. 6" and claim.claim.startswith(f"{name}: ") and claim.ours is not None


def _totals(tables: Sequence[Table]) -> dict[str, float]:
    """Fig. 6: attainment of all requests, by scheduler."""
    table = next((each for each in tables if each.title.startswith("Fig. 6")), None)
    if table is None:
        return {}
    at = {name: table.columns.index(name) for name in ("scheduler", "priority", "attained")}
    return {row[at["scheduler"]]: row[at["attained"]] for row in table.rows if row[at["priority"]] == "all"}  # type: ignore[misc]


def _mapped(table: Table, reason: str) -> Iterator[Claim]:
    rows: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in table.rows:
        named = dict(zip(table.columns, row, strict=True))
        rows.setdefault((named["model"], named["mix"], named["load, x"]), {})[named["scheduler"]] = named["attainment"]
    for (model, mix, load), met in rows.items():
        setting = f"Fig. 5: {model}, {mix} mix, targets mapped from priorities, {load:g} x round robin's 90 % point"
        yield _beside("attainment", setting, met[OURS[1]], met[OURS[0]], reason)


def _alone(table: Table, reason: str) -> Claim:
    column = table.columns.index(KNEE)
    found = {row[0]: row[column] for row in table.rows}
    return _beside("rate at 90 % (requests/s)", table.title.partition(";")[0], found[OURS[1]], found[OURS[0]], reason)


def _beside(what: str, setting: str, theirs: Any, ours: Any, reason: str) -> Claim:
    lost = ours < theirs
    return Claim(
        "Combined",
        "HyperFlexis",
        what,
        short(theirs),
        short(ours),
        not lost,
        setting,
        (1, 2, 3),
        reason if lost else "",
        verdict=SET,
    )


def calm_at_its_best(folder: Path = STORE) -> list[System]:
    """Packed and whole slots, each with the settings that earned most in the stored sweep of Concord's section.

    Raises RuntimeError if that was not run with the current candidates.
    """
    section = stored("concord", folder)
    tables = () if section is None else section.tables
    sweep = next((table for table in tables if table.title.endswith("own settings, swept")), None)
    earned = {(row[0], row[1]): sum(row[2:]) for row in sweep.rows} if sweep is not None else {}  # type: ignore[arg-type]
    best: list[System] = []
    for name in (CONCORD.name, WHOLE_SLOTS.name):
        known = [system for system in choices()[name] if (name, system.text) in earned]
        if not known:
            raise RuntimeError(f"no sweep of {name} is stored: run --paper concord first")
        best.append(max(known, key=lambda system: earned[system.name, system.text]))
    return best
