"""`make reproduce`: all papers, or those named by --paper; then writes docs/reproduction from all stored results.

Papers run in parallel, one process each, `--jobs` at a time; MFS alone takes `--jobs` processes. The last line of
output is one JSON object: the headlines (`benchmarks/reproduce/headlines.py`) and `claims`, a list.
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
from concurrent.futures import ProcessPoolExecutor
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
SPLIT = ("mfs",)  # papers whose runs can take several processes
PAPERS = ("hyperflexis", "flowprefill", "kairos", "concord", "mfs", "combined")


def run_paper(name: str, quick: bool, parts: Sequence[str] = (), traces: Path | None = None, jobs: int = 1) -> Section:
    """One paper's section (only `parts`, if given), with its duration. `traces`: for the one part that reads some.
    `jobs`: processes for the papers in SPLIT; the others take one.

    Progress goes to standard error, prefixed by the paper.
    """
    began = time.monotonic()
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
        "tree": _git("describe", "--always", "--dirty"),
        "deciders": _git("log", "-1", "--format=%h", "--", *DECIDERS),
        "Python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    copied = getattr(module, "COPIED_FROM", {})
    if parts and all(part in copied for part in parts):  # nothing ran but what another section stored
        meta["deciders"] = _deciders_of(copied[parts[0]])
    return replace(section, meta={**section.meta, **meta})


def _deciders_of(paper: str) -> str:
    """The commit of the deciders with which a stored section was run."""
    file = STORE / f"{paper}.json"
    meta = json.loads(file.read_text())["meta"] if file.exists() else {}
    return str(meta.get("deciders", "unknown"))


def _git(*command: str) -> str:
    found = subprocess.run(("git", *command), check=False, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def stored(folder: Path) -> list[Section]:
    """Sections in the order of PAPERS, without papers that were never run."""
    files = [folder / f"{name}.json" for name in PAPERS]
    return [Section.from_json(json.loads(file.read_text())) for file in files if file.exists()]


def retold(name: str, section: Section) -> Section:
    """A stored section with the text, and the reasons, that its module gives today; no figure changes."""
    tell = getattr(importlib.import_module(f"benchmarks.reproduce.{name}.section"), "retold", None)
    made: Section = tell(section) if tell else section
    return made


def _order(parser: argparse.ArgumentParser, names: Sequence[str], parts: Sequence[str]) -> tuple[str, ...]:
    """The parts of the one paper to run; exits if there are none of that name."""
    if not parts:
        return ()
    if len(names) != 1:
        parser.error("--part needs one --paper")
    order = tuple(getattr(importlib.import_module(f"benchmarks.reproduce.{names[0]}.section"), "PARTS", ()))
    unknown = sorted(set(parts) - set(order))
    if unknown:
        parser.error(f"{names[0]} has no part {unknown[0]!r}; valid: {', '.join(order) or 'none'}")
    return order


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
    order = _order(parser, names, parts)
    if (args.traces is None) == (parts == ("agents",)):
        parser.error("--part agents of Concord needs --traces, and nothing else reads it")
    done: list[Section] = []
    if not args.page_only:
        with ProcessPoolExecutor(max_workers=max(1, args.jobs)) as pool:
            each = max(1, args.jobs // len(names))
            made = [pool.submit(run_paper, name, args.quick, parts, args.traces, each) for name in names]
            for name, section in zip(names, (run.result() for run in made), strict=True):
                done.append(section)
                if not args.quick:
                    STORE.mkdir(parents=True, exist_ok=True)
                    if parts:
                        file = STORE / f"{name}.json"
                        kept = Section.from_json(json.loads(file.read_text())) if file.exists() else section
                        done[-1] = kept.updated(section, parts, order)
                    (STORE / f"{name}.json").write_text(json.dumps(done[-1].to_json(), indent=1) + "\n")
    if args.page_only:
        for name in names:
            file = STORE / f"{name}.json"
            if file.exists():
                told = retold(name, Section.from_json(json.loads(file.read_text())))
                file.write_text(json.dumps(told.to_json(), indent=1) + "\n")
    if not args.quick:
        done = stored(STORE)
        write(done, STORE)
    for claim in (claim for section in done for claim in section.claims):
        ours = "-" if claim.ours is None else f"{claim.ours:.4g}"
        print(f"{claim.paper:12} {claim.figure:12} {claim.claim:60.60} {claim.theirs!s:>8} {ours:>8} {claim.reached}")
    print(json.dumps({**headlines(done), "claims": [asdict(claim) for section in done for claim in section.claims]}))


if __name__ == "__main__":
    main()
