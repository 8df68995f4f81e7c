"""What gateways publish, shaped for pages: one row per class and tenant, the verdict in words, the fleet.

Pure functions of messages and a wall time, used for the first paint and for every live frame alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from console.wording.budget import budget_words
from controller.core import staleness as freshness
from controller.core.messages import ClassWindow, FleetMessage, InstanceMessage
from controller.slo.windows import merged_windows
from controller.wording.reasons import class_name, reason_in_words

CAPACITY = ("up", "undecoded", "coming", "none")  # from best to worst
CLOSE_SHARE = 0.75  # of the window's error budget used: the class is close to its limit


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
    now_budget: str  # in words
    refused: int
    failed: int
    queued: int
    oldest_slack_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_whose: str  # in words: the requests that both are of, and which are not among them
    tpot_p50_s: float | None
    goodput_tps: float
    why: str


class Verdict(TypedDict):
    """`was`: the headline once this is not current any more, for a page that has heard nothing since."""

    status: str
    headline: str
    was: str
    lines: list[dict[str, str]]


# Silence is not calm: with Redis or every gateway away, nobody knows whether requests miss their SLO.
NOBODY = "No gateway reports now: nothing is known about current requests"
UNKNOWN = Verdict(status="idle", headline=NOBODY, was=NOBODY, lines=[])
WHEN = "When last heard of,"


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
        ttft_whose=first_tokens_whose(window),
        tpot_p50_s=window["tpot_p50_s"],
        goodput_tps=window["goodput_tokens"] / window["window_s"] if window["window_s"] else 0.0,
        why=reason_in_words(window["miss_reason"]) if _misses(window) and window["miss_reason"] else "",
    )


NOBODYS = "no request ended in 60 s"  # of no traffic


def first_tokens_whose(window: ClassWindow) -> str:
    """Whom the times to the first token count, which is not always everybody whom attainment counts; and why not."""
    sampled, seen = window.get("sampled"), window.get("first_tokens")
    if not window["finished"]:
        return NOBODYS
    if sampled is None or seen is None:
        return "of those whose first token was seen"
    requests = "1 request" if sampled == 1 else f"{sampled:,} requests"
    whole = requests if sampled == window["finished"] else f"the newest {requests}"
    if seen == sampled:
        return f"of {whole}" if sampled == 1 else f"all {whole}".replace("all the", "all of the")
    left = {"not streamed": window.get("in_one_piece", 0)}
    left["not served"] = sampled - seen - left["not streamed"]
    why = ", ".join(f"{count:,} {what}" for what, count in left.items() if count)
    return f"{seen:,} of {whole}; {why}" if seen else f"none of {whole}: {why}"


def class_status(window: ClassWindow) -> tuple[str, str]:
    """Missing its SLO, close to it (three quarters of the window's budget gone, or a request already late), or fine."""
    finished, misses = window["finished"], _misses(window)
    slack = window["oldest_slack_s"]
    late = slack is not None and slack < 0
    if not finished:
        return ("warn", "late in queue") if late else ("idle", "no traffic")
    allowed = (1 - window["target"]) * finished
    if misses > allowed + 1e-9:
        return "bad", "missing"
    if late or (misses and misses >= CLOSE_SHARE * allowed):
        return "warn", "close"
    return "ok", "on target"


def verdict(rows: Sequence[ClassRow]) -> Verdict:
    """The first sentence of the page: who misses its SLO now, and why."""
    active = [row for row in rows if row["status"] != "idle"]
    bad = sorted((row for row in active if row["status"] == "bad"), key=_shortfall, reverse=True)
    warn = [row for row in active if row["status"] == "warn"]
    lines = [_line(row) for row in bad]
    if warn:
        lines.append(_close_line(warn))
    if bad:
        who = f"{len(bad)} of {len(active)} {'class' if len(active) == 1 else 'classes'}"
        one = len(bad) == 1
        headline = f"{who} {'misses its' if one else 'miss their'} SLO now"
        was = f"{WHEN} {who} missed {'its' if one else 'their'} SLO"
        return Verdict(status="bad", headline=headline, was=was, lines=lines)
    if warn:
        was = f"{WHEN} every SLO was kept, but with little room"
        return Verdict(status="warn", headline="Every SLO is kept, but with little room", was=was, lines=lines)
    if not active:
        was = f"{WHEN} no request had come for a minute"
        return Verdict(status="idle", headline="No requests in the last minute", was=was, lines=[])
    was = f"{WHEN} every SLO was kept"
    return Verdict(status="ok", headline="Every SLO is kept now", was=was, lines=[_calm_line(active)])


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


def _calm_line(rows: Sequence[ClassRow]) -> dict[str, str]:
    finished, misses = sum(row["finished"] for row in rows), sum(row["misses"] for row in rows)
    classes = "1 class" if len(rows) == 1 else f"{len(rows)} classes"
    text = f"{finished - misses} of {finished} requests of {classes} attained over 60 s"
    return {"key": "", "name": "", "status": "ok", "label": "on target", "text": text}


def _close_line(rows: Sequence[ClassRow]) -> dict[str, str]:
    """All that are close on one line: they come and go, and the page below must not jump with them."""
    names = ", ".join(f"{row['name']} · {row['tenant']} ({_close_why(row)})" for row in rows)
    return {"key": "", "name": "", "status": "warn", "label": "close", "text": names}


def _close_why(row: ClassRow) -> str:
    slack = row["oldest_slack_s"]
    if slack is not None and slack < 0:
        return f"a queued request is {-slack:.1f} s late"
    return f"{row['misses']} of {row['finished']} missed"


def _explain(row: ClassRow) -> str:
    share, target = f"{(row['attainment'] or 0.0) * 100:.3g} %", f"{row['target'] * 100:.3g} %"
    parts = [f"{share} attained of {target} promised ({row['misses']} of {row['finished']} missed)"]
    if row["why"]:
        parts.append(f"mostly: {row['why']}")
    slack = row["oldest_slack_s"]
    if slack is not None and slack < 0:
        parts.append(f"{row['queued']} waiting, the most urgent {-slack:.1f} s late")
    return "; ".join(parts)


def merge_instances(fleets: Iterable[FleetMessage]) -> list[InstanceMessage]:
    """Instances by id; the newest gateway's view wins, what each gateway sent adds up."""
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
    """Requests at once, over all gateways; a gateway of before this was published says nothing."""
    return dict(sum((Counter(fleet.get("tenants", {})) for fleet in fleets), Counter()))


def capacity(fleets: Iterable[FleetMessage]) -> dict[str, str]:
    """What becomes of requests by model (CAPACITY), as the best placed gateway says: they see the same
    engines, each a moment sooner or later. Empty where none says it."""
    best: dict[str, str] = {}
    for fleet in fleets:
        for model, said in fleet.get("capacity", {}).items():
            if said in CAPACITY:  # a newer release may know more
                best[model] = min(said, best.get(model, said), key=CAPACITY.index)
    return dict(sorted(best.items()))


def overview(fleets: Sequence[FleetMessage]) -> dict[str, Any]:
    """Everything the Overview shows live."""
    rows = [class_row(window) for window in merged_windows(fleets)]
    instances = merge_instances(fleets)
    finished = sum(row["finished"] for row in rows)
    attained = sum(row["finished"] - row["misses"] for row in rows)
    return {
        "verdict": verdict(rows) if fleets else UNKNOWN,
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
    """Without those of gateways that have fallen silent."""
    limit = stale_after_s(fleets)
    return [fleet for fleet in fleets if now - fleet["at"] <= limit]


def stale_after_s(fleets: Iterable[FleetMessage]) -> float:
    """Of the slowest publisher among them."""
    return freshness.stale_after_s(max((fleet["period_s"] for fleet in fleets), default=0.0))
