"""Batching policies: what runs in the next step of an engine. Importing this package registers all of them."""

from controller.policies.batching import (
    calm,
    chunked_prefill,
    credit_based,
    earliest_deadline_first,
    iteration_level,
    kairos_decode,
    kairos_urgency,
    kairos_urgency_printed,
    learned_rank,
    least_attained_service,
    ordered_chunks,
    shortest_job_first,
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
    "earliest_deadline_first",
    "iteration_level",
    "kairos_decode",
    "kairos_urgency",
    "kairos_urgency_printed",
    "learned_rank",
    "least_attained_service",
    "ordered_chunks",
    "selects",
    "shortest_job_first",
    "simulated_annealing",
    "slo_aware_batching",
    "vllm_v1",
]
