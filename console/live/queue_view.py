"""The part of the queue that one browser shows: a window of rows, each with its predicted start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from console.live.live_view import row_key
from console.live.queue_mirror import QueueMirror, Shown
from controller.wording.vocabulary import class_name

ROWS_MAX = 200
OFFSET_MAX = 10_000_000
TEXT_MAX = 100
KEY_MAX = 200


@dataclass(frozen=True, slots=True)
class RowWindow:
    """`limit` rows from `offset`, of one class (`key`: tenant/class) or matching a text. `held`: updates are paused."""

    offset: int = 0
    limit: int = 60
    key: str = ""
    text: str = ""
    held: bool = False


def window_of(message: Mapping[str, Any]) -> RowWindow | None:
    """The window that a browser requests; None if the message is invalid."""
    fields = {name: value for name, value in message.items() if name != "type"}
    if not fields.keys() <= {"offset", "limit", "key", "text", "held"}:
        return None
    offset, limit = fields.get("offset", 0), fields.get("limit", 60)
    key, text, held = fields.get("key", ""), fields.get("text", ""), fields.get("held", False)
    if type(offset) is not int or type(limit) is not int or type(held) is not bool:
        return None
    if not (isinstance(key, str) and isinstance(text, str)) or len(key) > KEY_MAX or len(text) > TEXT_MAX:
        return None
    if not 0 <= offset <= OFFSET_MAX or not 1 <= limit <= ROWS_MAX:
        return None
    return RowWindow(offset, limit, key, text.strip(), held)


def ids_in(mirror: QueueMirror, window: RowWindow) -> Sequence[str]:
    """The ids of all rows that the window can scroll through, in order."""
    tenant, _, slo_class = window.key.partition("/")
    return mirror.ids((tenant, slo_class) if window.key else None, window.text)


def queue_frame(
    mirror: QueueMirror, window: RowWindow, ids: Sequence[str], capacity: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The rows of the window. Of a row that left while updates are paused only the id is known. `capacity`: by model,
    whether an engine takes its requests; empty if unknown."""
    offset = min(window.offset, max(0, len(ids) - window.limit))
    return {
        "total": len(mirror),
        "gateways": mirror.gateways,
        "capacity": dict(capacity),
        "matching": len(ids),
        "offset": offset,
        "held": window.held,
        "key": window.key,  # lets a browser that has changed its filter meanwhile ignore this frame
        "text": window.text,
        "by_class": [
            {
                "key": row_key(tenant, slo_class),
                "tenant": tenant,
                "slo_class": slo_class,
                "name": class_name(slo_class),
                "count": count,
                "due_at": due_at,
            }
            for (tenant, slo_class), count, due_at in mirror.kinds()
        ],
        "rows": [as_row(mirror, request_id) for request_id in ids[offset : offset + window.limit]],
    }


def as_row(mirror: QueueMirror, request_id: str) -> dict[str, Any]:
    shown = mirror.shown(request_id)
    if shown is None:
        return {"id": request_id, "left": True}
    row: dict[str, Any] = {name: value for name, value in shown.row.items() if name != "order"}
    return {**row, "start_at": predicted_start(shown)}


def predicted_start(shown: Shown) -> float | None:
    """Predicted start in epoch seconds, at the service rate of the last ten seconds if no other request overtakes it.

    None if it is paused, if it can no longer meet its TTFT (then it is served last, from spare capacity, or never), and
    while no request of its model has started lately.
    """
    if shown.row["paused"] or shown.row["hopeless"] or shown.rate <= 0:
        return None
    return round(shown.at + (shown.ahead + 1) / shown.rate, 1)
