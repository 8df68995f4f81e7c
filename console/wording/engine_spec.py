"""What an engine was started with, as its page shows it: only what is set, and nothing that reads like a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.wording.vocabulary import Figure, shown

# A foreign server's notes may hold what its registrar liked: what is called like this is not for every reader.
SECRET = re.compile(r"pass(word|wd|phrase)?$|secret|token$|credential|private|auth|(^|_|-)key$|apikey", re.IGNORECASE)
IN_URL = re.compile(r"(?<=://)[^/@\s]*@")  # somebody's name and password
HIDDEN = "set (hidden)"
# Names that do not read as words by themselves.
NAMES_OF_SETTINGS = {
    "kv_blocks": "KV blocks",
    "kv_cache_gib": "KV cache, GiB",
    "kv_capacity_tokens": "KV cache, tokens",
    "kv_role": "KV transfer role",
    "max_model_len": "maximum context, tokens",
    "max_num_batched_tokens": "maximum tokens per step",
    "chunk_tokens": "prompt chunk, tokens",
    "dtype": "data type",
    "batching": "batching policy",
    "startup_delay": "startup delay, s",
    "start_after": "earliest start",
    "weights": "weights at start",
    "host_copy": "host copy of the weights",
    "emulated_load_s": "emulated weight load, s",
    "emulated_weight_bytes": "emulated weight size, bytes",
    "swap_bytes": "host memory for evicted KV, bytes",
}


def engine_spec(spec: Mapping[str, Any]) -> list[Figure]:
    """By name, as a person would look for it."""
    found = [_setting(key, value) for key, value in spec.items() if value not in (None, "", [], {})]
    return sorted(found, key=lambda each: each.name.lower())


def _setting(key: str, value: Any) -> Figure:
    name, safe = NAMES_OF_SETTINGS.get(key, key.replace("_", " ")), without_secrets(key, value)
    text = safe if isinstance(safe, str) else shown(key, safe, "at") if key == "start_after" else _plainly(safe)
    return Figure(name, text, key)


def _plainly(value: Any) -> str:
    """Numbers as they were given: an option's own value, not a measurement."""
    if isinstance(value, bool) or value is None:
        return shown("", value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plainly(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plainly, value)) or "none"
    return str(value)


def without_secrets(key: str, value: Any) -> Any:
    """The same with what must not be read left out, however deep it lies."""
    if SECRET.search(key):
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: without_secrets(str(name), each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_secrets("", each) for each in value]
    return IN_URL.sub("", value) if isinstance(value, str) else value
