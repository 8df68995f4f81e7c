"""The connector itself, `"kv_connector": "SlacklineConnector"`: what vLLM calls, in its scheduler and in its worker.

Loads are asynchronous: vLLM lets a request wait aside for its KV while its steps run others. KV is sent out of the
cache, whose blocks stay the request's until another server has them, so nothing is copied within a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from controller.core.errors import ConfigError
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.plan import KvOrders, KvPrompt, TransferPlan
from workers.vllm_connector.settings import settings_from
from workers.vllm_connector.stats import SlacklineMetrics, SlacklineStats
from workers.vllm_connector.transfers import Transfers
from workers.vllm_plugin.answers import MOVED
from workers.vllm_plugin.hints import read_hints
from workers.vllm_plugin.versions import check_version

check_version(vllm.__version__, "KV connector", "kv_connector_module_path")


class SlacklineMetadata(KVConnectorMetadata):
    """Orders of one step."""

    def __init__(self, orders: KvOrders) -> None:
        self.orders = orders


class SlacklineConnector(ExampleConnector):
    """Of one server without tensor, pipeline or data parallelism, with its KV cache in the host's memory."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        _check(vllm_config, kv_cache_config)
        self._settings = settings_from(transfer.kv_connector_extra_config, transfer.kv_port, os.environ)
        self._plan = TransferPlan(
            self._settings, self._block_size, produces=transfer.is_kv_producer, consumes=transfer.is_kv_consumer
        )
        self._transfers: Transfers | None = None
        self._lost: set[int] = set()

    # ---- in the scheduler -------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found = self._plan.to_load(_prompt(request), num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plan.allocated(_prompt(request), blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> SlacklineMetadata:
        usage = self._kv_cache_manager.usage if self._kv_cache_manager is not None else 0.0
        return SlacklineMetadata(self._plan.orders(usage))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        by_length = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        offer = self._plan.finished(_prompt(request), block_ids, by_length=by_length)
        return (False, None) if offer is None else (True, offer.as_params())

    # ---- in the worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        about = _about(self._vllm_config.model_config, self._block_size, kv_caches)
        arrays = {name: _as_bytes(name, cache) for name, cache in kv_caches.items()}
        blocks = CacheBlocks(arrays, self._kv_cache_config.num_blocks, self._block_size, about)
        self._transfers = Transfers(self._settings, blocks)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Transfers begin with the step and not after it: their blocks are no others' until they are reported."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, SlacklineMetadata)
        if self._transfers is not None:
            self._transfers.order(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began when their orders came."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: KV is sent out of the cache, once the prompt is computed."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if self._transfers is None:
            return set(), set()
        self._transfers.cancel(finished_req_ids)
        ended = self._transfers.ended()
        self._lost |= ended.lost
        return ended.sent, ended.loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self._lost = self._lost, set()
        return found

    def get_kv_connector_stats(self) -> SlacklineStats | None:
        if self._transfers is None:
            return None
        found: dict[str, Any] = {**self._transfers.figures()}
        if moved := self._transfers.moved():
            found[MOVED] = moved
        return SlacklineStats(data=found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SlacklineStats:
        return SlacklineStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *given: Any, **named: Any) -> SlacklineMetrics:
        return SlacklineMetrics(*given, **named)

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()


def _check(config: Any, cache: Any) -> None:
    """Raises ConfigError for a server whose KV this connector cannot move."""
    parallel = config.parallel_config
    if parallel.world_size != 1 or parallel.data_parallel_size != 1:
        raise ConfigError("Slackline's KV connector moves the KV of servers without parallelism")
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('set "kv_load_failure_policy": "recompute": KV that is lost has to be computed')
    if cache is not None and len(cache.kv_cache_groups) != 1:
        raise ConfigError("Slackline's KV connector moves the KV of models whose layers all keep it alike")


def _about(model: Any, block_tokens: int, caches: Mapping[str, Any]) -> str:
    """What bytes of the same number mean: the model, the types of numbers, and in which order the kernels of this
    processor pack them, which is another one with AMX."""
    numbers = sorted({str(cache.dtype) for cache in caches.values()})
    packing = _get_attn_isa(model.dtype, block_tokens, model.get_head_size())
    return f"{model.served_model_name} {' '.join(numbers)} {packing}"


def _as_bytes(name: str, cache: Any) -> Any:
    """Raises ConfigError."""
    import torch

    if not isinstance(cache, torch.Tensor) or cache.device.type != "cpu":
        raise ConfigError(f"the KV cache of {name} is not in the host's memory: use NIXL for that of a GPU")
    return cache.view(torch.uint8).numpy()


def _prompt(request: Any) -> KvPrompt:
    """Its KV also depends on images, which stand for tokens, and on the adapter."""
    params = request.sampling_params
    left_s = read_hints(params.extra_args if params is not None else None).ttft_left_s
    adapter = request.lora_request
    about = [feature.identifier for feature in request.mm_features]
    if adapter is not None:
        about.append(f"adapter {adapter.lora_name}")
    due = request.arrival_time + left_s if left_s != float("inf") else None
    return KvPrompt(
        request.request_id, request.prompt_token_ids or (), request.kv_transfer_params, tuple(about), due
    )  # fmt: skip
