"""Figures of other sections that the combined set's section uses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import SET, Claim, Progress, Section, Table, Value
from benchmarks.reproduce.combined.pairs import short
from benchmarks.reproduce.concord.lab import CONCORD, WHOLE_SLOTS, System
from benchmarks.reproduce.concord.sweep import choices
from benchmarks.reproduce.hyperflexis.setting import OURS

STORE = Path(__file__).resolve().parents[3] / "docs" / "reproduction"
KNEE = "90 % point, requests/s"
COUNTED = (
    "a second counts if the mean TTFT of each class meets its target, so it matters which class is postponed. Attained "
    "by the set and by HyperFlexis: {parts}; of all requests {ours:.3f} and {theirs:.3f}"
)


TITLE = re.compile(r"Fig\. 3, (?P<model>\w+), (?P<mix>\S+); ")
BY_NUMBER = "Fig. 3 by the number of sequences per engine: "
SEQUENCES = (64, 256)  # with 32, as in the other rows, the numbers that people run
UNPAIRED = (
    "behind by {:.3f}, less than the standard error of the difference of the means ({:.3f}); pairs are not stored"
)
BEYOND = "behind by {:.3f}, more than the standard error of the difference of the means ({:.3f})"
BY_CLASS = "the set and the other attain, by class, {}"
SINGLE = "the spread over the seeds is not stored"


def stored(paper: str, folder: Path = STORE) -> Section | None:
    file = folder / f"{paper}.json"
    return Section.from_json(json.loads(file.read_text())) if file.exists() else None


def _report(progress: Progress, folder: Path) -> Section:
    """HyperFlexis' section; empty if it was not run."""
    section = stored("hyperflexis", folder)
    if section is None:
        progress("HyperFlexis' section is not stored: its figures are left out")
    return section or Section("HyperFlexis", "", [], [])


def figure_3(progress: Progress, folder: Path = STORE) -> Iterator[Claim]:
    """Each load of Fig. 3 on a fixed fleet and on one that scales out."""
    for table in _report(progress, folder).tables:
        found = TITLE.match(table.title)
        if found is None:
            continue
        rows = {str(row[0]): row[1:] for row in table.rows}
        for workers, suffix in (("2 workers", ""), ("2 to 4 workers", " on 2 to 4")):
            mine, other = (map(_spread, rows[f"{name}{suffix}"]) for name in OURS)
            for load, ours, theirs in zip(table.columns[1:], mine, other, strict=True):
                setting = f"{found['model']}, {found['mix']} mix, {workers}, {load} round robin's 90 % point"
                yield _means("HyperFlexis", "attainment", setting, theirs, ours, (1, 2, 3))


def by_sequences(progress: Progress, rivals: Sequence[str], folder: Path = STORE) -> Iterator[Claim]:
    """Each load of Fig. 3 with 64 and 256 sequences per engine, against the best of `rivals`."""
    for table in _report(progress, folder).tables:
        model = table.title.removeprefix(BY_NUMBER)
        if model == table.title:
            continue
        met: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
        classes: dict[tuple[Any, ...], dict[str, str]] = {}
        for row in table.rows:
            named: dict[str, Any] = dict(zip(table.columns, row, strict=True))
            if named["sequences"] in SEQUENCES:
                load = (named["sequences"], named["mix"], named["load, x"])
                met.setdefault(load, {})[named["scheduler"]] = named["attainment"], named["± std"]
                classes.setdefault(load, {})[named["scheduler"]] = named["attainment by class"]
        for (slots, mix, load), by_name in met.items():
            best = max(rivals, key=lambda name: by_name[name][0])
            setting = f"{model}, {mix} mix, 2 workers, {load:g} x round robin's 90 % point; {best}"
            home = f"HyperFlexis, {slots} sequences"
            made = _means(home, "attainment over the best of all", setting, by_name[best], by_name[OURS[0]], (1, 2))
            if made.reason:
                told = BY_CLASS.format(_beside_each_other(classes[slots, mix, load], OURS[0], best))
                made = replace(made, reason=f"{made.reason}; {told}")
            yield made


def _beside_each_other(by_name: Mapping[str, str], ours: str, theirs: str) -> str:
    """ "a 0.9 and 0.8, b 1.0 and 0.7" of "a 0.9, b 1.0" and "a 0.8, b 0.7"."""
    pairs = zip(by_name[ours].split(", "), by_name[theirs].split(", "), strict=True)
    return ", ".join(f"{mine} and {other.rpartition(' ')[2]}" for mine, other in pairs)


def _spread(text: Value) -> tuple[float, float]:
    """Mean and deviation of "0.971 ± 0.016, 4.0 s, 803"."""
    mean, _, deviation = str(text).partition(",")[0].partition(" ± ")
    return float(mean), float(deviation)


def _means(
    home: str,
    what: str,
    setting: str,
    theirs: tuple[float, float],
    ours: tuple[float, float],
    seeds: tuple[int, ...],
) -> Claim:
    """Of means and deviations over `seeds` that are no pairs: behind is behind, but the reason says by how much."""
    error = math.hypot(theirs[1], ours[1]) / len(seeds) ** 0.5
    behind = theirs[0] - ours[0]
    why = (UNPAIRED if behind < error else BEYOND).format(behind, error) if behind > 0 else ""
    return Claim("Combined", home, what, short(theirs[0]), short(ours[0]), not why, setting, seeds, why, verdict=SET)


def from_the_report(progress: Progress, folder: Path = STORE) -> Iterator[Claim]:
    """HyperFlexis' Fig. 5 to 7."""
    section = _report(progress, folder)
    for table in section.tables:
        if table.title.startswith("Fig. 5"):
            yield from _mapped(table)
        elif table.title.startswith("Fig. 7, ") and KNEE in table.columns:
            yield _alone(table)
    for table in section.tables:
        if table.title.startswith("Fig. 6"):
            yield from _clients(table, section.claims)


def _clients(table: Table, claims: Sequence[Claim]) -> Iterator[Claim]:
    """One number of sequences of Fig. 6, which the table's title and the claims' settings end and contain."""
    slots = table.title.rpartition("; ")[2]
    found = {
        name: claim
        for claim in claims
        for name in OURS
        if claim.figure == "Fig. 6" and claim.claim.startswith(f"{name}: ") and slots in claim.setting
    }
    if len(found) < len(OURS):
        return
    met = _by_priority(table)
    ours, theirs = met[OURS[0]], met[OURS[1]]
    parts = ", ".join(f"{name} {ours[name]:.3f} and {theirs[name]:.3f}" for name in ours if name != "all")
    why = COUNTED.format(parts=parts, ours=ours["all"], theirs=theirs["all"])
    yield _beside(
        "share of seconds in which P0 to P2 keep their TTFT", f"Fig. 6: {found[OURS[0]].setting}",
        found[OURS[1]].ours, found[OURS[0]].ours, why,
    )  # fmt: skip


def _by_priority(table: Table) -> dict[str, dict[str, float]]:
    """Attained share by scheduler and priority ("P0" to "P3", "all")."""
    at = [table.columns.index(name) for name in ("scheduler", "priority", "attained")]
    met: dict[str, dict[str, float]] = {}
    for row in table.rows:
        name, priority, share = (row[index] for index in at)
        met.setdefault(str(name), {})[str(priority).partition(" ")[0]] = float(share or 0.0)
    return met


def _mapped(table: Table) -> Iterator[Claim]:
    rows: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in table.rows:
        named = dict(zip(table.columns, row, strict=True))
        rows.setdefault((named["model"], named["mix"], named["load, x"]), {})[named["scheduler"]] = named["attainment"]
    for (model, mix, load), met in rows.items():
        setting = f"Fig. 5: {model}, {mix} mix, targets mapped from priorities, {load:g} x round robin's 90 % point"
        yield _beside("attainment", setting, met[OURS[1]], met[OURS[0]], SINGLE)


def _alone(table: Table) -> Claim:
    column = table.columns.index(KNEE)
    found = {row[0]: row[column] for row in table.rows}
    return _beside("rate at 90 % (requests/s)", table.title.partition(";")[0], found[OURS[1]], found[OURS[0]], SINGLE)


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
