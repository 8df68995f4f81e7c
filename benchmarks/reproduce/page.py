"""Writes docs/reproduction from the stored sections: a summary, one page per paper, its plots, and its tables as
CSV.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import PRINTED_STRONGER, SET_STRONGER, VERDICTS, Claim, Plot, Section, Table, Value

HEAD = """# Reproduction

We measured figures of five papers again, each under the paper's own workload. *Combined* runs the policy set
`slackline` in each of these settings. The figures compare policies; they say nothing about a machine.

`make reproduce` writes these pages; do not edit them by hand. To run one paper, use
`.venv/bin/python -m benchmarks.reproduce --paper NAME`; for one figure of HyperFlexis add `--part fig7`. `--page-only`
writes the texts and pages for the stored results and runs nothing. Concord's part `agents` needs a trace that is not
shipped: `--paper concord --part agents --traces DIR`.

A paper takes one core for 12 (FlowPrefill) to about 86 minutes (MFS, whose limit of 60 is missed); each page says how
long its parts took.

All papers but Kairos run in the simulator: the dispatcher, engine schedulers, mapping and scaler that serve, on fitted
latency profiles and virtual time. Kairos runs the same engine schedulers in an event loop of its own
(`benchmarks/reproduce/kairos/stages.py`), one prefill and one decode engine without a gateway; *Combined* simulates its
setting whole, with `decode_by: longest`. MFS runs the flow schedulers of the transfer daemons over a simulated network
(`controller/simulator/flows`).

Each figure of a paper makes one or more claims. Verdicts of five kinds are counted apart:

- **policy as printed, the paper's baselines**: what the paper claims, by its own algorithm;
- **policy as printed, stronger baselines**: baselines that the paper does not have, or has in a weaker form, such as
  SCORPIO with one queue for all instances and the best of its settings, or the priorities of today's engines;
- **combined set, the paper's baselines**: our default policy set `slackline` by the paper's values;
- **combined set, stronger baselines**;
- **policy with a change of ours, the paper's baselines**: by the paper's values; the page names the change.

The paper's values say nothing about a stronger baseline, so those claims have a bar of ours, fixed before the run: at
least as good as the baseline.

"""
FIGURES_HEAD = """
The next table shows how many claims of each figure we reached, by kind of verdict, and the first claim with the
paper's value (or our bar) and ours. Variants of a figure, such as Fig. 3 with other numbers of sequences, share a row.
The unit of a claim stands in brackets; *factor* means one system's value divided by the other's. A claim is not judged
if its baseline could only be built from another paper's description, or if the paper gives nothing to compare with. The
pages of the papers list all claims.

"""
MARKS = {True: "yes", False: "no", None: "not judged"}
SUMMARY = ("paper", "figure", *VERDICTS.values(), "not judged", "first claim", "in the paper", "bar", "here")
CLAIMS = ("figure", "verdict on", "claim", "paper's", "bar", "ours", "reached", "setting", "seeds", "reason")
FIGURES = ("figure", "verdict on", "claims reached", "not judged")
DIRTY = "-dirty"  # of `git describe --dirty`: the tree had changes that were not committed
CLAIMS_NAMED = 2  # claims named per reason
LONGEST_NAME = 60  # characters of a table's file name
COMBINED = "Combined"  # its claims name the paper whose setting they are in, not a figure
TITLES = {"flowprefill": "FlowPrefill", "concord": "Concord"}  # papers that stored results spell differently


def write(sections: Sequence[Section], folder: Path) -> None:
    """README.md, PAPER.md and tables/PAPER/*.csv in `folder`, and one SVG per plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(HEAD + _summary(sections))
    for section in sections:
        for plot in section.plots:
            draw(plot, folder / f"{plot.name}.svg")
        (folder / f"{_name(section.paper)}.md").write_text(_page(section, folder))


def _summary(sections: Sequence[Section]) -> str:
    found: dict[tuple[str, str], list[Claim]] = {}
    for (paper, figure, _), claims in _by_figure([claim for section in sections for claim in section.claims]):
        found.setdefault((paper, figure.partition(",")[0]), []).extend(claims)
    rows = [
        [
            f"[{_title(paper)}]({_name(paper)}.md)",
            _figure(paper, figure),
            *_by_verdict(claims),
            sum(claim.reached is None for claim in claims),
            claims[0].claim,
            claims[0].theirs,
            claims[0].bar,
            claims[0].ours,
        ]
        for (paper, figure), claims in found.items()
    ]
    return _verdicts(sections) + FIGURES_HEAD + _markdown(SUMMARY, rows)


def _verdicts(sections: Sequence[Section]) -> str:
    """One row per paper, one column per kind of verdict; there is no sum over kinds."""
    rows = [
        [
            f"[{_title(section.paper)}]({_name(section.paper)}.md)",
            *_by_verdict(section.claims),
        ]
        for section in sections
    ]
    return _markdown(("claims reached", *VERDICTS.values()), rows)


def _by_verdict(claims: Sequence[Claim]) -> list[str]:
    """Claims reached, for each kind of verdict."""
    return [_reached([claim for claim in claims if claim.verdict == verdict]) for verdict in VERDICTS]


def _by_figure(claims: Sequence[Claim]) -> Iterator[tuple[tuple[str, str, str], list[Claim]]]:
    """By paper, figure and verdict, in the order of first appearance, since parts run again may be out of order."""
    found: dict[tuple[str, str, str], list[Claim]] = {}
    for claim in claims:
        found.setdefault((claim.paper, claim.figure, claim.verdict), []).append(claim)
    figures = list(dict.fromkeys(key[:2] for key in found))
    return iter(sorted(found.items(), key=lambda item: (figures.index(item[0][:2]), list(VERDICTS).index(item[0][2]))))


def _counts(claims: Sequence[Claim]) -> tuple[str, int]:
    return _reached(claims), sum(claim.reached is None for claim in claims)


def _reached(claims: Sequence[Claim]) -> str:
    judged = [claim.reached for claim in claims if claim.reached is not None]
    return f"{sum(judged)} of {len(judged)}" if judged else "-"


def _page(section: Section, folder: Path) -> str:
    """One paper: setting, run, results by figure, reasons for differences, plots, and links to its tables."""
    rows = [
        (_figure(paper, figure), VERDICTS[verdict], *_counts(found))
        for (paper, figure, verdict), found in _by_figure(section.claims)
    ]
    parts = [
        f"# {_title(section.paper)}\n\n",
        f"{section.settings_text.strip()}\n\n",
        _run(section) if section.meta else "",
    ]
    parts += ["## Results\n\n", _markdown(FIGURES, rows), "\n"]
    parts += [f"![{plot.title}]({plot.name}.svg)\n\n" for plot in section.plots]
    parts += _reasons(section.claims)
    parts += ["## Tables\n\n", _tables(section, folder)]
    return "".join(parts).rstrip() + "\n"


def _run(section: Section) -> str:
    """When it was run, and its parts; where each part has a run of its own, how long they took together: the processor
    time where it is known."""
    meta = section.meta
    again: Mapping[str, Mapping[str, Any]] = meta.get("parts", {})
    parts = [f"- {_part(name)}: run again {_when(own)}\n" for name, own in again.items()]
    took = [str(own.get("processor", own.get("took", ""))).removesuffix(" s") for own in again.values()]
    made = {claim.part for claim in section.claims} | {table.part for table in section.tables}
    if len(again) > 1 and made <= set(again) and all(each.isdigit() for each in took):
        seconds = sum(map(int, took))
        known = sum("processor" in own for own in again.values())
        what = ", of processor time" if known else ""
        what += " where it is known" if 0 < known < len(again) else ""
        parts.append(f"- all of these parts: {seconds:,} s ({seconds / 60:.0f} minutes){what}\n")
    return f"Run {_when(meta)}.\n\n" + ("".join([*parts, "\n"]) if parts else "")


def _part(name: str) -> str:
    """`Fig. 3` for `fig3` and `Table 2` for `table2`, the names that `--part` takes; others stay as they are."""
    return re.sub(r"^table(\d+)$", r"Table \1", re.sub(r"^fig(\d+)$", r"Fig. \1", name))


def _when(meta: Mapping[str, Any]) -> str:
    """Date, duration, commit and machine of a run, as far as they are known."""
    commit, dirty = str(meta.get("tree", "")).removesuffix(DIRTY), str(meta.get("tree", "")).endswith(DIRTY)
    told = [
        f"on {meta['on']}" if "on" in meta else "",
        f"in {meta['took']}" if "took" in meta else "",
        f"with {meta['processor']} of processor time" if "processor" in meta else "",
        (f"from commit {commit}" + (" with changes that were not committed yet" if dirty else "")) if commit else "",
        f"with the deciders of commit {meta['deciders']}" if "deciders" in meta else "",
        f"with Python {meta['Python']}" if "Python" in meta else "",
        f"on {meta['cores']} cores" if "cores" in meta else "",
    ]
    return ", ".join(each for each in told if each)


def _reasons(claims: Sequence[Claim]) -> list[str]:
    """What is missed or not judged, and why; then what is reached beside baselines that the paper does not have."""
    beside = [claim for claim in claims if claim.reached and claim.verdict in (SET_STRONGER, PRINTED_STRONGER)]
    others = [claim for claim in claims if claim not in beside]
    return _told("Differences from the paper", others) + _told("Reached beside stronger baselines", beside)


def _told(title: str, claims: Sequence[Claim]) -> list[str]:
    """Each reason once, with the claims that it explains; the table of all claims has the reason of each."""
    given: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        if claim.reason:
            given.setdefault((claim.figure, claim.reason), []).append(claim.claim)
    lines = [f"- **{figure}**, {_some(names)}: {reason}\n" for (figure, reason), names in given.items()]
    return [f"## {title}\n\n", *lines, "\n"] if lines else []


def _some(names: Sequence[str]) -> str:
    first = list(dict.fromkeys(names))[:CLAIMS_NAMED]
    more = len(names) - len(first)
    return "; ".join(f'"{name}"' for name in first) + (f" and {more} more" if more else "")


def _tables(section: Section, folder: Path) -> str:
    """Write all claims and every table as CSV; returns the list of links."""
    told = any(claim.analyser for claim in section.claims)
    rows = [
        [
            c.figure, VERDICTS[c.verdict], c.claim, c.theirs, c.bar, c.ours, MARKS[c.reached], c.setting,
            " ".join(map(str, c.seeds)), *([c.analyser] if told else []), c.reason,
        ]
        for c in section.claims
    ]  # fmt: skip
    columns = (*CLAIMS[:-1], *(["analyser"] if told else []), CLAIMS[-1])
    place = folder / "tables" / _name(section.paper)
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.csv"):
        old.unlink()
    lines = []
    for table in (Table("All claims", columns, rows), *section.tables):
        file = place / f"{_name(table.title)}.csv"
        if file.exists():
            raise ValueError(f"{section.paper}: two tables would be written to {file.name}; change a title")
        with file.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerows([table.columns, *([_plain(value) for value in row] for row in table.rows)])
        lines.append(f"- [{table.title}]({file.relative_to(folder).as_posix()}), {len(table.rows)} rows\n")
    return "".join(lines)


def _figure(paper: str, figure: str) -> str:
    return f"setting of {figure}" if paper == COMBINED else figure


def _title(paper: str) -> str:
    return TITLES.get(paper, paper)


def _name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower())[:LONGEST_NAME].strip("-")


def _plain(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: Value) -> str:
    return "-" if value is None else _plain(value).replace("|", "\\|")


def draw(plot: Plot, path: Path) -> None:
    """One SVG without a date, so that equal data give an equal file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "slackline"
    plt.rcParams["svg.fonttype"] = "none"  # text as text, which makes files a third of the size
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, (label, points) in enumerate(plot.series.items()):
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, marker="osD^vPX*"[index % 8], markersize=4, label=label)
    if plot.level is not None:
        axes.axhline(plot.level, color="grey", linestyle="--", linewidth=1)
    if plot.log_x:
        axes.set_xscale("log")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
