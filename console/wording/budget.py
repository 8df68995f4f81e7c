"""The error budget: how many misses a target allows in a window, and how many of them are left."""

from __future__ import annotations

from typing import Any


def error_budget(finished: int, misses: int, target: float) -> dict[str, Any]:
    """The part of the error budget that is left, or how many times the allowed misses there were."""
    if not finished:
        return {"budget_text": "–", "budget_status": "", "budget_share": 0.0}
    allowed = (1 - target) * finished
    used = misses / allowed if allowed > 0 else (0.0 if not misses else float("inf"))
    if used > 1:
        text = f"{used:.1f}x the allowed misses" if allowed > 0 else "no miss is allowed"
        return {"budget_text": text, "budget_status": "bad", "budget_share": 1.0}
    status = "warn" if used > 0.75 else "ok"
    return {
        "budget_text": f"{(1 - used) * 100:.0f} % left",
        "budget_status": status,
        "budget_share": round(1 - used, 4),
    }


def budget_words(finished: int, misses: int, target: float) -> str:
    """The budget in words, shown below a share; empty without requests."""
    return str(error_budget(finished, misses, target)["budget_text"]) if finished else ""
