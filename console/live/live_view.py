"""What gateways publish, shaped for pages: one row per class and tenant, a summary in words, the fleet.

Pure functions of messages and a wall time. The first paint and every live frame use the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from console.wording.budget import budget_words
from controller.core import staleness
from controller.core.messages import ClassWindow, FleetMessage, InstanceMessage
from controller.slo.windows import merged_windows
from controller.wording.vocabulary import class_name, reason_in_words

CAPACITY = ("up", "undecoded", "coming", "on_demand", "none")  # from best to worst
AT_RISK_SHARE = 0.75  # of the window's error budget: a class that has used this much is at risk


class ClassRow(TypedDict):
    """One class of one tenant over the last window. Shares 0..1, seconds, tokens per second."""

    key: str
    tenant: str
    slo_class: str
    name: str
    status: str  # ok | warn | bad | idle
    status_text: str
    target: float
    attainment: float | None
    finished: int
    misses: int
    now_budget: str  # error budget of the window, in words
    refused: int
    failed: int
    queued: int
    oldest_slack_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_counted: str  # in words: how many requests the two TTFT figures count, and which they leave out
    tpot_p50_s: float | None
    goodput_tps: float
    why: str


class Summary(TypedDict):
    """Headline and lines above the Overview. `was`: the headline for a page whose data has become stale."""

    status: str
    headline: str
    was: str
    lines: list[dict[str, str]]


# Without Redis or any gateway, attainment is unknown: that must not look like a quiet system.
UNKNOWN_HEADLINE = "No gateway is reporting, so current attainment is unknown"
UNKNOWN = Summary(status="idle", headline=UNKNOWN_HEADLINE, was=UNKNOWN_HEADLINE, lines=[])
WHEN = "At the last update,"


def row_key(tenant: str, slo_class: str) -> str:
    return f"{tenant}/{slo_class}"


def _smallest(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _misses(window: ClassWindow) -> int:
    return window["finished"] - window["attained"]


def class_row(window: ClassWindow) -> ClassRow:
    status, text = class_status(window)
    finished = window["finished"]
    return ClassRow(
        key=row_key(window["tenant"], window["slo_class"]),
        tenant=window["tenant"],
        slo_class=window["slo_class"],
        name=class_name(window["slo_class"]),
        status=status,
        status_text=text,
        target=window["target"],
        attainment=window["attained"] / finished if finished else None,
        finished=finished,
        misses=_misses(window),
        now_budget=budget_words(finished, _misses(window), window["target"]),
        refused=window["refused"],
        failed=window["failed"],
        queued=window["queued"],
        oldest_slack_s=window["oldest_slack_s"],
        ttft_p50_s=window["ttft_p50_s"],
        ttft_p95_s=window["ttft_p95_s"],
        ttft_counted=ttft_requests(window),
        tpot_p50_s=window["tpot_p50_s"],
        goodput_tps=window["goodput_tokens"] / window["window_s"] if window["window_s"] else 0.0,
        why=reason_in_words(window["miss_reason"]) if _misses(window) and window["miss_reason"] else "",
    )


NO_REQUESTS = "no requests in 60 s"


def ttft_requests(window: ClassWindow) -> str:
    """How many requests the TTFT quantiles count: unlike attainment, only those with a first token on record."""
    sampled, seen = window.get("sampled"), window.get("first_tokens")
    if not window["finished"]:
        return NO_REQUESTS
    if sampled is None or seen is None:
        return "requests with a first token"
    requests = "1 request" if sampled == 1 else f"{sampled:,} requests"
    whole = requests if sampled == window["finished"] else f"the newest {requests}"
    if seen == sampled:
        return f"of {whole}" if sampled == 1 else f"all {whole}".replace("all the", "all of the")
    left = {"not streamed": window.get("in_one_piece", 0)}
    left["not served"] = sampled - seen - left["not streamed"]
    why = ", ".join(f"{count:,} {what}" for what, count in left.items() if count)
    return f"{seen:,} of {whole}; {why}" if seen else f"none of {whole}: {why}"


def class_status(window: ClassWindow) -> tuple[str, str]:
    """Status and its words. At risk: AT_RISK_SHARE of the window's budget is used, or a queued request is late."""
    finished, misses = window["finished"], _misses(window)
    slack = window["oldest_slack_s"]
    late = slack is not None and slack < 0
    if not finished:
        return ("warn", "late in queue") if late else ("idle", "no traffic")
    allowed = (1 - window["target"]) * finished
    if misses > allowed + 1e-9:
        return "bad", "below target"
    if late or (misses and misses >= AT_RISK_SHARE * allowed):
        return "warn", "at risk"
    return "ok", "on target"


def summary(rows: Sequence[ClassRow]) -> Summary:
    """The first sentence of the Overview: which classes miss their SLO, and why."""
    active = [row for row in rows if row["status"] != "idle"]
    bad = sorted((row for row in active if row["status"] == "bad"), key=_shortfall, reverse=True)
    warn = [row for row in active if row["status"] == "warn"]
    lines = [_line(row) for row in bad]
    if warn:
        lines.append(_at_risk_line(warn))
    if bad:
        who = f"{len(bad)} of {len(active)} {'class' if len(active) == 1 else 'classes'}"
        one = len(bad) == 1
        headline = f"{who} {'is missing its' if one else 'are missing their'} SLO"
        was = f"{WHEN} {who} {'was missing its' if one else 'were missing their'} SLO"
        return Summary(status="bad", headline=headline, was=was, lines=lines)
    if warn:
        was = f"{WHEN} all SLOs were met, with little margin"
        return Summary(status="warn", headline="All SLOs are met, with little margin", was=was, lines=lines)
    if not active:
        was = f"{WHEN} there had been no requests for a minute"
        return Summary(status="idle", headline="No requests in the last minute", was=was, lines=[])
    was = f"{WHEN} all SLOs were met"
    return Summary(status="ok", headline="All SLOs are met", was=was, lines=[_on_target_line(active)])


def _shortfall(row: ClassRow) -> float:
    return row["target"] - (row["attainment"] or 0.0)


def _line(row: ClassRow) -> dict[str, str]:
    name = f"{row['name']} · {row['tenant']}"
    return {
        "key": row["key"],
        "name": name,
        "status": row["status"],
        "label": row["status_text"],
        "text": _explain(row),
    }


def _on_target_line(rows: Sequence[ClassRow]) -> dict[str, str]:
    finished, misses = sum(row["finished"] for row in rows), sum(row["misses"] for row in rows)
    classes = "1 class" if len(rows) == 1 else f"{len(rows)} classes"
    text = f"{finished - misses} of {finished} requests in {classes} attained their SLO in the last 60 s"
    return {"key": "", "name": "", "status": "ok", "label": "on target", "text": text}


def _at_risk_line(rows: Sequence[ClassRow]) -> dict[str, str]:
    """All classes at risk on one line: they change often, and the page below should not move with them."""
    names = ", ".join(f"{row['name']} · {row['tenant']} ({_at_risk_why(row)})" for row in rows)
    return {"key": "", "name": "", "status": "warn", "label": "at risk", "text": names}


def _at_risk_why(row: ClassRow) -> str:
    slack = row["oldest_slack_s"]
    if slack is not None and slack < 0:
        return f"a queued request is {-slack:.1f} s late"
    return f"{row['misses']} of {row['finished']} missed"


def _explain(row: ClassRow) -> str:
    share, target = f"{(row['attainment'] or 0.0) * 100:.3g} %", f"{row['target'] * 100:.3g} %"
    parts = [f"{share} attained, target {target} ({row['misses']} of {row['finished']} missed)"]
    if row["why"]:
        parts.append(f"main cause: {row['why']}")
    slack = row["oldest_slack_s"]
    if slack is not None and slack < 0:
        parts.append(f"{row['queued']} queued, the most urgent {-slack:.1f} s late")
    return "; ".join(parts)


def merge_instances(fleets: Iterable[FleetMessage]) -> list[InstanceMessage]:
    """Instances by id. The newest gateway's view wins; counts of what each gateway sent are added up."""
    newest: dict[str, InstanceMessage] = {}
    for fleet in sorted(fleets, key=lambda fleet: fleet["at"]):
        for instance in fleet["instances"]:
            sent = newest[instance["id"]]["sent_total"] if instance["id"] in newest else 0
            newest[instance["id"]] = InstanceMessage(**{**instance, "sent_total": instance["sent_total"] + sent})
    return sorted(newest.values(), key=lambda each: (each["role"], each["model"], each["id"]))


def roles(instances: Iterable[InstanceMessage]) -> list[dict[str, Any]]:
    """How many instances of each role are in which state: "180 up, 12 draining"."""
    counts: dict[str, Counter[str]] = {}
    for instance in instances:
        counts.setdefault(instance["role"], Counter())[instance["state"]] += 1
    return [
        {"role": role, "total": states.total(), "text": ", ".join(f"{n} {state}" for state, n in states.most_common())}
        for role, states in sorted(counts.items())
    ]


def open_by_tenant(fleets: Iterable[FleetMessage]) -> dict[str, int]:
    """Open requests by tenant over all gateways. Older gateways do not publish this and count as none."""
    return dict(sum((Counter(fleet.get("tenants", {})) for fleet in fleets), Counter()))


def capacity(fleets: Iterable[FleetMessage]) -> dict[str, str]:
    """By model, the best state (CAPACITY) that any gateway reports: all see the same engines, some a moment earlier.
    Empty if no gateway reports it."""
    best: dict[str, str] = {}
    for fleet in fleets:
        for model, said in fleet.get("capacity", {}).items():
            if said in CAPACITY:  # a newer release may publish other states
                best[model] = min(said, best.get(model, said), key=CAPACITY.index)
    return dict(sorted(best.items()))


def overview(fleets: Sequence[FleetMessage]) -> dict[str, Any]:
    """Everything the Overview shows live."""
    rows = [class_row(window) for window in merged_windows(fleets)]
    instances = merge_instances(fleets)
    finished = sum(row["finished"] for row in rows)
    attained = sum(row["finished"] - row["misses"] for row in rows)
    return {
        "summary": summary(rows) if fleets else UNKNOWN,
        "classes": rows,
        "instances": instances,
        "roles": roles(instances),
        "tenants": open_by_tenant(fleets),
        "totals": {
            "attainment": attained / finished if finished else None,
            "finished": finished,
            "goodput_tps": sum(row["goodput_tps"] for row in rows),
            "arrival_rate": sum(fleet["arrival_rate"] for fleet in fleets),
            "service_rate": sum(fleet["service_rate"] for fleet in fleets),
            "queued": sum(fleet["queued"] for fleet in fleets),
            "queued_tokens": sum(fleet["queued_tokens"] for fleet in fleets),
            "in_flight": sum(fleet["in_flight"] for fleet in fleets),
            "oldest_slack_s": _smallest(*(row["oldest_slack_s"] for row in rows)),
            "policy": ", ".join(sorted({fleet["policy"] for fleet in fleets})),
            "gateways": len(fleets),
        },
    }


def fresh(fleets: Sequence[FleetMessage], now: float) -> list[FleetMessage]:
    """The messages of gateways that still report."""
    limit = stale_after_s(fleets)
    return [fleet for fleet in fleets if now - fleet["at"] <= limit]


def stale_after_s(fleets: Iterable[FleetMessage]) -> float:
    """The limit of the slowest publisher among them, in seconds."""
    return staleness.stale_after_s(max((fleet["period_s"] for fleet in fleets), default=0.0))
