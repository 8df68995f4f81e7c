"""The connector's figures as vLLM's own metrics: counters `slackline:kv_*` on the server's `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from workers.vllm_connector.figures import HELP, added
from workers.vllm_plugin.answers import MOVED, TOLD

PREFIX = "slackline:kv_"


class SlacklineStats(KVConnectorStats):
    """`data`: what `figures.KvFigures` has grown by, and MOVED."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        moved = {**self.data.get(MOVED, {}), **other.data.get(MOVED, {})}
        self.data = added(self.data, other.data) | ({MOVED: moved} if moved else {})
        return self

    def reduce(self) -> dict[str, int | float]:
        return {HELP[name].rstrip("."): round(value, 3) for name, value in self.data.items() if name in HELP}

    def is_empty(self) -> bool:
        return not self.data


class SlacklineMetrics(KVConnectorPromMetrics):
    """One counter for each figure. In the process that serves HTTP, so that answers hear of loads here."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=PREFIX + name, documentation=text, labelnames=labelnames), per_engine
            )
            for name, text in HELP.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
        TOLD.add(transfer_stats_data.get(MOVED, {}))
