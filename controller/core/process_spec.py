"""What the `spec` of an instance of provisioner `process` may say, and hence reaches the reference engine it starts."""

from __future__ import annotations

from collections.abc import Iterable

# Options of `python -m workers.engine`, as the engine names them but for the hyphens.
OPTIONS = (
    *("profile", "role", "model", "seed", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_blocks"),
    *("block_size", "scheduling_policy", "batching", "batching_options", "startup_delay", "scheduler", "boundary"),
    *("chunk_tokens", "executor", "served_model_name", "device", "dtype", "threads", "kv_cache_gib", "tensor_parallel"),
    *("weights", "host_copy", "emulated_load_s", "emulated_weight_bytes"),
)
FLAGS = ("deadlines", "keep_room")  # the same, of options without a value
OWN_FIELDS = {  # what the instance itself says: here it would be overruled without a word
    "model": "model",
    "served_model_name": "model",
    "role": "role",
    "max_num_seqs": "max_num_seqs",
    "tensor_parallel": "tp",
    "url": "url",
    "id": "id",
}
NOTES = (
    "folder",  # of a real model's weights (executor torch)
    "kv_capacity_tokens",  # becomes kv_blocks
    "start_after",  # epoch seconds before which a replacement does not start
)
SAYABLE = tuple(sorted({*OPTIONS, *FLAGS, *NOTES} - OWN_FIELDS.keys()))


def refusal(names: Iterable[str]) -> str:
    """What is wrong with these names of a `spec`, and what is valid; "" where nothing is."""
    said = set(names)
    if misplaced := sorted(said & OWN_FIELDS.keys()):
        return f"{misplaced[0]} is not said here but by the instance's own {OWN_FIELDS[misplaced[0]]}."
    if unknown := sorted(said - set(SAYABLE)):
        return f"unknown: {', '.join(unknown)}; an engine started here can be told {', '.join(SAYABLE)}."
    return ""
