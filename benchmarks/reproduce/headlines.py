"""The few figures by which a whole `make reproduce` is judged, taken from the stored claims and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.reproduce.claims import Claim, Section

LARGER = ("HyperFlexis, 64 sequences", "HyperFlexis, 256 sequences")  # figures of the combined set, one a size
ADDED = re.compile(r"1 worker of (64|256) sequences")  # settings that were compared later than the first 104
COST = re.compile(r"slackline, scaling: disaggregated cost over round robin's, (\w+), highest")
GAINS = "Gains over DistServe at equal normalised load (judged), at equal QPS, and the largest"
Headlines = dict[str, Mapping[str, float] | Mapping[str, Mapping[str, float]]]


def headlines(sections: Sequence[Section]) -> Headlines:
    """`combined`: loads at which the combined set is at least as good, all of them, of those with 32 sequences, and of
    those with 64 and 256. `pd_cost`: by model, cost of the set with a scaler over round robin's (factor, highest of the
    loads). `kairos_gains`: by figure, gain over DistServe in points at the paper's QPS and at its multiple of
    DistServe's own 90 % point, and the paper's; throughput, in per cent, is not among them.

    Sections that were never run are left out.
    """
    found: Headlines = {}
    by_name = {section.paper: section for section in sections}
    if "Combined" in by_name:
        claims = by_name["Combined"].claims
        larger = [claim for claim in claims if claim.figure in LARGER]
        first = [claim for claim in claims if claim.figure not in LARGER and not ADDED.search(claim.setting)]
        found["combined"] = {
            "at_least_as_good": _reached(claims), "loads": len(claims),
            "at_least_as_good_of_first": _reached(first), "first_loads": len(first),
            "at_least_as_good_at_64_and_256": _reached(larger), "loads_at_64_and_256": len(larger),
        }  # fmt: skip
    if "HyperFlexis" in by_name:
        costs = ((COST.match(claim.claim), claim.ours) for claim in by_name["HyperFlexis"].claims)
        found["pd_cost"] = {match[1]: ours for match, ours in costs if match and ours is not None}
    if "Kairos" in by_name:
        found["kairos_gains"] = _gains(by_name["Kairos"])
    return found


def _reached(claims: Sequence[Claim]) -> int:
    return sum(claim.reached is True for claim in claims)


def _gains(section: Section) -> dict[str, dict[str, float]]:
    columns = {
        "paper": "paper's gain",
        "at_the_papers_qps": "our gain at the paper's QPS",
        "at_the_papers_multiple": "our gain there",
    }
    found: dict[str, dict[str, float]] = {}
    for table in section.tables:
        if table.title == GAINS:
            for row in table.rows:
                told = dict(zip(table.columns, row, strict=True))
                if "attainment" in str(told["what"]):
                    values = {key: told[column] for key, column in columns.items()}
                    found[str(told["figure"])] = {key: float(v) for key, v in values.items() if v is not None}
    return found
