"""Batching policies: what runs in the next step of an engine. Importing this package registers the built-in ones."""

from controller.policies.batching import (
    calm,
    chunked_prefill,
    credit_based,
    engine_orders,
    iteration_level,
    kairos_decode,
    kairos_urgency,
    ordered_chunks,
    simulated_annealing,
    slo_aware_batching,
    vllm_v1,
)
from controller.policies.batching.base import BATCHINGS, Batching, EngineView, Grant, Pausing, selects

__all__ = [
    "BATCHINGS",
    "Batching",
    "EngineView",
    "Grant",
    "Pausing",
    "calm",
    "chunked_prefill",
    "credit_based",
    "engine_orders",
    "iteration_level",
    "kairos_decode",
    "kairos_urgency",
    "ordered_chunks",
    "selects",
    "simulated_annealing",
    "slo_aware_batching",
    "vllm_v1",
]
