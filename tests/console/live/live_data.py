"""Messages as gateways publish them, with one line."""

from __future__ import annotations

from typing import Any

from controller.core.messages import ClassWindow, FleetMessage, InstanceMessage, QueueChanges, QueueRow, QueueState

NOON = 1_792_584_000.0


def window(**fields: Any) -> ClassWindow:
    """Ninety-eight of a hundred attained, nothing queued."""
    defaults: dict[str, Any] = {
        "tenant": "acme", "slo_class": "chat", "window_s": 60.0, "finished": 100, "attained": 98, "ttft_met": 98,
        "tpot_met": 100, "refused": 0, "failed": 0, "cancelled": 0, "goodput_tokens": 6000, "target": 0.95, "queued": 0,
        "oldest_slack_s": None, "ttft_p50_s": 0.2, "ttft_p95_s": 0.4, "tpot_p50_s": 0.05, "miss_reason": "",
    }  # fmt: skip
    return ClassWindow(**{**defaults, **fields})  # type: ignore[typeddict-item]


def instance(**fields: Any) -> InstanceMessage:
    defaults: dict[str, Any] = {
        "id": "engine-1", "model": "demo", "role": "collocated", "state": "up", "running": 2, "waiting": 0,
        "waiting_tokens": 0, "kv_usage": 0.1, "slots": 8, "utilisation": 0.25, "telemetry_age_s": 0.3, "sent_total": 10,
    }  # fmt: skip
    return InstanceMessage(**{**defaults, **fields})  # type: ignore[typeddict-item]


def fleet(**fields: Any) -> FleetMessage:
    defaults: dict[str, Any] = {
        "gateway": "gateway-1", "at": NOON, "seq": 1, "period_s": 1.0, "instances": [instance()], "queued": 0,
        "queued_tokens": 0, "in_flight": 2, "arrival_rate": 5.0, "service_rate": 4.5, "wait_over_slo": 0.1,
        "models": {}, "tenants": {"acme": 3}, "capacity": {"demo": "up"},
        "classes": [window()], "policy": "slackline",
    }  # fmt: skip
    return FleetMessage(**{**defaults, **fields})  # type: ignore[typeddict-item]


def queue_row(ident: str = "req-1", due_at: float = NOON + 1.0, **fields: Any) -> QueueRow:
    defaults: dict[str, Any] = {
        "id": ident, "tenant": "acme", "slo_class": "chat", "model": "demo", "prompt_tokens": 100,
        "output_tokens": 20, "ttft_s": 1.0, "arrived_at": due_at - 1.0, "due_at": due_at, "order": [0.0, due_at],
        "gives_up_at": due_at + 4.0, "hopeless": False, "paused": False, "priority": 0,
    }  # fmt: skip
    return QueueRow(**{**defaults, **fields})  # type: ignore[typeddict-item]


def queue_state(*rows: QueueRow, **fields: Any) -> QueueState:
    defaults: dict[str, Any] = {
        "gateway": "gateway-1", "feed": "f1", "version": 1, "asked": 1, "at": NOON, "rates": {"demo": 2.0},
        "rows": list(rows),
    }  # fmt: skip
    return QueueState(**{**defaults, **fields})  # type: ignore[typeddict-item]


def queue_changes(base: int, *put: QueueRow, gone: tuple[str, ...] = (), total: int, **fields: Any) -> QueueChanges:
    """From `base` to the next version, or to none where there is nothing in it."""
    defaults: dict[str, Any] = {
        "gateway": "gateway-1", "feed": "f1", "base": base, "version": base + bool(put or gone), "at": NOON + base,
        "rates": {"demo": 2.0}, "total": total, "put": list(put), "gone": list(gone),
    }  # fmt: skip
    return QueueChanges(**{**defaults, **fields})  # type: ignore[typeddict-item]
