"""The console's own Prometheus metrics. `views/site/metrics.py` adds attainment and queue, read at scrape time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "slackline_console_requests",
    "Requests answered by the console, by view",
    ("view", "method", "status"),
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "slackline_console_request_seconds",
    "Server time of a console request, seconds",
    ("view",),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
    registry=REGISTRY,
)
SOCKETS = Gauge("slackline_console_websockets", "Open WebSockets by topic", ("topic",), registry=REGISTRY)
SLOW_SOCKETS = Counter(
    "slackline_console_websockets_slow",
    "WebSockets closed because the browser stopped reading",
    ("topic",),
    registry=REGISTRY,
)
FRAMES_SENT = Counter("slackline_console_frames_sent", "Live frames sent to browsers", ("topic",), registry=REGISTRY)
FRAMES_MERGED = Counter(
    "slackline_console_frames_merged", "Live updates merged into a later frame", ("topic",), registry=REGISTRY
)
REFUSED = Counter(
    "slackline_console_refused",
    "POST requests refused because of CSRF or a missing sign-in, by reason",
    ("reason",),
    registry=REGISTRY,
)
