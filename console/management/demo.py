"""Contents of the demo of `make up`, which `manage.py seed_demo` stores in the database."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from workers.supervisor.settings import FLEET_HOST

MODEL = "demo"
PROFILE = "llama-3.1-8b-a100"
HOST = FLEET_HOST
DEVICES = 4
DEVICE_KIND = "emulated-a100"
DEVICE_MEMORY_BYTES = 80 * 2**30
ENGINE_SEQS = 6  # few, so that a burst of the demo load fills two engines and the scaler has to act

TRACE = Path(__file__).parents[2] / "controller/simulator/samples/azure2023_conv_2000.csv"
TRACE_NAME = "Azure 2023 conversation, 2,000 of 19,366 requests (CC-BY-4.0)"

# Only with `--demo`: the fixed key printed in the documentation. Not for machines that others can reach.
DEMO_SECRET = "sk-slackline-demo-key-not-for-production-use"


RETENTION_S = 600  # of answers: steps can be resumed and forked, as the how-to of workflows shows
NO_QUOTAS: dict[str, Any] = {"rpm": None, "tpm": None, "max_concurrency": None}


class DemoTenant(NamedTuple):
    name: str
    title: str
    default_class: str
    limits: dict[str, Any]


# Targets of the four tasks of HyperFlexis, Table 1 (medical_qa, tldr_content_gen, tldr_headline_gen, wikisql), and one
# deferrable class.
CLASSES: tuple[dict[str, Any], ...] = (
    {"name": "interactive", "title": "Chat: a user is waiting for the answer", "ttft_s": 0.7, "tpot_s": 0.5,
     "waiting_time_s": 5.0, "target": 0.95, "value": 1.0},
    {"name": "standard", "title": "Drafting longer texts", "ttft_s": 1.0, "tpot_s": 0.7,
     "waiting_time_s": 5.0, "target": 0.95, "value": 1.0},
    {"name": "summaries", "title": "Headlines and summaries of articles", "ttft_s": 2.0, "tpot_s": 0.9,
     "waiting_time_s": 10.0, "target": 0.95, "value": 1.0},
    {"name": "analytics", "title": "Queries over tables", "ttft_s": 20.0, "tpot_s": 1.0,
     "waiting_time_s": 30.0, "target": 0.95, "value": 1.0},
    {"name": "batch", "title": "Offline jobs that can wait for capacity", "ttft_s": 60.0, "tpot_s": 2.0,
     "waiting_time_s": 120.0, "target": 0.90, "value": 0.5, "may_defer": True},
)  # fmt: skip

TENANTS = (
    DemoTenant("demo", "Demo", "interactive", {**NO_QUOTAS, "retention_s": RETENTION_S}),
    DemoTenant("acme", "Acme Support", "standard", {**NO_QUOTAS, "max_concurrency": 500}),
    DemoTenant("research", "Research", "batch", {**NO_QUOTAS, "rpm": 3000, "tpm": 2_000_000}),
)

PEOPLE = ("admin", "operator", "viewer")  # user name and role


def mapping_levels() -> list[dict[str, float]]:
    """Priorities 0 to 3 as in HyperFlexis-PM (sec. 7.3): the targets of the four tasks, with a range of 25 %."""
    levels = []
    for row in CLASSES[:4]:
        level: dict[str, float] = {}
        for what in ("ttft", "tpot"):
            middle = row[f"{what}_s"]
            level |= {
                f"{what}_s": middle,
                f"{what}_min_s": round(0.75 * middle, 6),
                f"{what}_max_s": round(1.25 * middle, 6),
            }
        levels.append(level)
    return levels
