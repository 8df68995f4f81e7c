"""What gateways and the coordinator of pruning exchange through Redis: reports of queues, orders, and what wakes whom.

Written once, as dialogues of Redis commands, for the asynchronous client of a gateway and the synchronous one of the
coordinator's task (see `workers.live`). Moments are epoch seconds of Redis' clock, which gateways share.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import orjson

from controller.core.messages import (
    PRUNING_CHANNEL,
    PRUNING_ORDERS_KEY,
    PRUNING_REPORT_KEY,
    PRUNING_SEQUENCE_KEY,
    PRUNING_WAKE_KEY,
    HostFlows,
)
from controller.core.pruning import (
    OpenKv,
    PruneReason,
    PruningOrders,
    QueueReport,
    orders_to_json,
    report_from_json,
    report_to_json,
)
from controller.flow.flows import FlowStage
from controller.flow.gate import OFF
from workers.live import Dialogue, gateways, host_flows, orders_of, server_time

FRESH_S = 2.0  # how old a daemon's report may be, to count with what it says of transfers
PERIOD_S = 1.0  # gateways report at least so often
VALID_S = 3 * PERIOD_S  # of orders; reports are kept as long


def publish_report(report: QueueReport) -> Dialogue[None]:
    """Store the gateway's report and wake the coordinator."""
    key = PRUNING_REPORT_KEY.format(gateway=report.gateway)
    yield ("SET", key, orjson.dumps(report_to_json(report)), "PX", int(VALID_S * 1000))
    yield ("LPUSH", PRUNING_WAKE_KEY, b"1")
    yield ("LTRIM", PRUNING_WAKE_KEY, 0, 0)


def withdraw_report(gateway: str) -> Dialogue[None]:
    """This gateway is not pruned any more."""
    yield ("DEL", PRUNING_REPORT_KEY.format(gateway=gateway))


def wait_for_news(timeout_s: float) -> Dialogue[bool]:
    """Whether a queue changed within `timeout_s`."""
    return (yield ("BLPOP", PRUNING_WAKE_KEY, timeout_s)) is not None


def read_reports() -> Dialogue[tuple[Sequence[QueueReport], float]]:
    """The newest report of each gateway that wrote a readable one lately, and the time. One of another release, which
    cannot be read, is left out: that gateway's queue is then not pruned."""
    names = yield from gateways()
    values = (yield ("MGET", *(PRUNING_REPORT_KEY.format(gateway=name) for name in names))) if names else []
    found = [report for value in values if value is not None and (report := report_of(value)) is not None]
    return found, (yield from server_time())


def read_open_kv() -> Dialogue[Mapping[str, OpenKv] | None]:
    """By request, the KV that is being sent, as transfer daemons reported it within the last moments; None if none of
    them orders transfers."""
    fresh = [host for host in (yield from host_flows()) if time.time() - host["at"] < FRESH_S]
    hosts = [host for host in fresh if host["policy"] != OFF]
    if not hosts:
        return None
    receives = _bandwidths(fresh)
    found: dict[str, OpenKv] = {}
    for host in hosts:
        left: defaultdict[str, float] = defaultdict(float)
        sizes: defaultdict[str, float] = defaultdict(float)
        receivers: dict[str, str] = {}
        for flow in host["flows"]:
            if not flow["end"] and flow["request"] and flow["stage"] == FlowStage.KV_TRANSFER:
                left[flow["request"]] += flow["left_bytes"]
                sizes[flow["request"]] += flow["size_bytes"]
                receivers[flow["request"]] = flow["to"]
        found |= {
            name: OpenKv(
                host["host"], min(1.0, left[name] / size), receivers[name], size, receives.get(receivers[name], 0.0)
            )
            for name, size in sizes.items()
            if size > 0
        }
    return found


def _bandwidths(hosts: Sequence[HostFlows]) -> dict[str, float]:
    """Bytes/s of receiving ports by their address, as the daemons there were told. Without addresses that several hosts
    have, as those of container networks."""
    counted = Counter(address for host in hosts for address in host.get("receives_at", ()))
    return {
        address: host["bandwidth"] for host in hosts for address in host.get("receives_at", ()) if counted[address] == 1
    }


def report_of(value: bytes) -> QueueReport | None:
    """None for anything but a report."""
    try:
        return report_from_json(orjson.loads(value))
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return None


def publish_orders(
    scavengers: Mapping[str, PruneReason],
    now: float,
    waiting: int,
    batches: int,
    known: Sequence[str],
    order: Sequence[str] = (),
) -> Dialogue[PruningOrders]:
    """Count the orders and send them to all gateways. The count is Redis' own, so that a restarted coordinator's orders
    follow on those before it."""
    sequence = int((yield ("INCR", PRUNING_SEQUENCE_KEY)))
    orders = PruningOrders(sequence, now, now + VALID_S, scavengers, waiting, batches, known, order)
    message = orjson.dumps(orders_to_json(orders))
    yield ("SET", PRUNING_ORDERS_KEY, message, "PX", int(VALID_S * 1000))
    yield ("PUBLISH", PRUNING_CHANNEL, message)
    return orders


def read_orders() -> Dialogue[PruningOrders | None]:
    """The orders in force, if there are any."""
    value = yield ("GET", PRUNING_ORDERS_KEY)
    return None if value is None else orders_of(value)
