"""`make reproduce`: all papers, or those named by --paper; then writes docs/reproduction from all stored results.

Papers run in parallel, one process each, `--jobs` at a time. MFS runs in parts, and what a part has found is stored as
soon as it ends; one part alone takes `--jobs` processes. The last line of output is one JSON object: the headlines
(`benchmarks/reproduce/headlines.py`) and `claims`, a list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import Section
from benchmarks.reproduce.headlines import headlines
from benchmarks.reproduce.page import write

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "docs" / "reproduction"
DECIDERS = ("controller",)  # what decides in every run: their last commit is stored with the results
SPLIT = ("mfs",)  # papers that run part by part, in several processes: hours of work that an end would lose
PAPERS = ("hyperflexis", "flowprefill", "kairos", "concord", "mfs", "combined")


def run_paper(name: str, parts: Sequence[str], quick: bool, traces: Path | None = None, jobs: int = 1) -> Section:
    """One paper's section (only `parts`, if given), with its duration. `traces`: for the one part that reads some.
    `jobs`: processes for the papers in SPLIT; the others take one.

    Progress goes to standard error, prefixed by the paper.
    """
    began, busy = time.monotonic(), _processor_s()
    module = importlib.import_module(f"benchmarks.reproduce.{name}.section")
    chosen: dict[str, Any] = {"parts": parts} if parts else {}
    if traces is not None:
        chosen["traces"] = traces
    if name in SPLIT:
        chosen["jobs"] = jobs
    section: Section = module.reproduce(
        lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True), quick, **chosen
    )
    meta = {
        "on": f"{datetime.now(UTC):%Y-%m-%d}",
        "took": f"{time.monotonic() - began:.0f} s",
        "processor": f"{_processor_s() - busy:.0f} s",
        "tree": _git("describe", "--always", "--dirty"),
        "deciders": _git("log", "-1", "--format=%h", "--", *DECIDERS),
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    copied = getattr(module, "COPIED_FROM", {})
    if parts and all(part in copied for part in parts):  # nothing ran but what another section stored
        meta["deciders"] = _deciders_of(copied[parts[0]])
    return replace(section, meta={**section.meta, **meta})


def _processor_s() -> float:
    """Processor time of this process and of those that it waited for: what a run takes however busy the machine is."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _deciders_of(paper: str) -> str:
    """The commit of the deciders with which a stored section was run."""
    file = STORE / f"{paper}.json"
    meta = json.loads(file.read_text())["meta"] if file.exists() else {}
    return str(meta.get("deciders", "unknown"))


def _git(*command: str) -> str:
    found = subprocess.run(("git", *command), check=False, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _write(name: str, section: Section) -> None:
    (STORE / f"{name}.json").write_text(json.dumps(section.to_json(), indent=1) + "\n")


def stored(folder: Path) -> list[Section]:
    """Sections in the order of PAPERS, without papers that were never run."""
    files = [folder / f"{name}.json" for name in PAPERS]
    return [Section.from_json(json.loads(file.read_text())) for file in files if file.exists()]


def retold(name: str, section: Section) -> Section:
    """A stored section with the text, and the reasons, that its module gives today; no figure changes."""
    tell = getattr(importlib.import_module(f"benchmarks.reproduce.{name}.section"), "retold", None)
    made: Section = tell(section) if tell else section
    return made


def _parts_of(name: str) -> tuple[str, ...]:
    return tuple(getattr(importlib.import_module(f"benchmarks.reproduce.{name}.section"), "PARTS", ()))


def _runs(names: Sequence[str], parts: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each run's paper and parts (none: the whole paper)."""
    return [
        run
        for name in names
        for run in ([(name, (part,)) for part in parts or _parts_of(name)] if name in SPLIT else [(name, tuple(parts))])
    ]


def _with(kept: Section | None, name: str, section: Section, parts: Sequence[str]) -> Section:
    """A run's results, beside those that are kept of the paper's other parts."""
    return (kept or section).updated(section, parts, _parts_of(name)) if parts else section


def _read(name: str) -> Section | None:
    file = STORE / f"{name}.json"
    return Section.from_json(json.loads(file.read_text())) if file.exists() else None


def _check_parts(parser: argparse.ArgumentParser, names: Sequence[str], parts: Sequence[str]) -> None:
    """Exits if the one paper to run has no parts of these names."""
    if not parts:
        return
    if len(names) != 1:
        parser.error("--part needs one --paper")
    order = _parts_of(names[0])
    unknown = sorted(set(parts) - set(order))
    if unknown:
        parser.error(f"{names[0]} has no part {unknown[0]!r}; valid: {', '.join(order) or 'none'}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="append", choices=PAPERS, help="may be given more than once; default: all")
    parser.add_argument(
        "--part", action="append", help="run only this part of one paper; its other parts keep their stored results"
    )
    parser.add_argument("--traces", type=Path, help="folder of agents' traces, which Concord's part agents reads")
    parser.add_argument("--quick", action="store_true", help="small sizes, one seed; printed, not stored")
    parser.add_argument(
        "--page-only", action="store_true", help="write texts and pages for the stored results, run nothing"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at a time")
    args = parser.parse_args(argv)
    names = args.paper or list(PAPERS)
    parts = tuple(args.part or ())
    _check_parts(parser, names, parts)
    if (args.traces is None) == (parts == ("agents",)):
        parser.error("--part agents of Concord needs --traces, and nothing else reads it")
    done: dict[str, Section] = {}
    if not args.page_only:
        runs = _runs(names, parts)
        each = max(1, args.jobs // len(runs))
        with ProcessPoolExecutor(max_workers=max(1, args.jobs)) as pool:
            made = {pool.submit(run_paper, *run, args.quick, args.traces, each): run for run in runs}
            for run in as_completed(made):
                name, ran = made[run]
                if run.exception() is not None:
                    continue  # the others' results are stored first
                kept = done.get(name) if args.quick else _read(name)
                done[name] = _with(kept, name, run.result(), ran)
                if not args.quick:
                    STORE.mkdir(parents=True, exist_ok=True)
                    _write(name, done[name])
        for run in made:
            run.result()  # raises what it failed with
    if args.page_only:
        for name in names:
            if (section := _read(name)) is not None:
                _write(name, retold(name, section))
    sections = list(done.values())
    if not args.quick:
        sections = stored(STORE)
        write(sections, STORE)
    claims = [claim for section in sections for claim in section.claims]
    for claim in claims:
        ours = "-" if claim.ours is None else f"{claim.ours:.4g}"
        print(f"{claim.paper:12} {claim.figure:12} {claim.claim:60.60} {claim.theirs!s:>8} {ours:>8} {claim.reached}")
    print(json.dumps({**headlines(sections), "claims": [asdict(claim) for claim in claims]}))


if __name__ == "__main__":
    main()
