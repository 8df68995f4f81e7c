"""Templates that come with Slackline. They are stored as rows, so that they can be read, copied and changed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

_VLLM = (
    *("vllm", "serve", "${model}", "--served-model-name", "${served_name}", "--host", "${host}", "--port", "${port}"),
    *("--max-model-len", "${context}", "--max-num-seqs", "${slots}", "--tensor-parallel-size", "${tp}"),
    # Its log would be our own probes, one a second: the lines that matter would be gone within minutes.
    *("--scheduling-policy", "priority", "--disable-uvicorn-access-log"),
)
_KV = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
_SGLANG = (
    *("python3", "-m", "sglang.launch_server", "--model-path", "${model}", "--served-model-name", "${served_name}"),
    *("--host", "${host}", "--port", "${port}", "--context-length", "${context}"),
    *("--max-running-requests", "${slots}", "--tp", "${tp}", "--enable-metrics"),
)
_REFERENCE = (
    *("${python}", "-m", "workers.engine", "--model", "${served_name}", "--host", "${host}", "--port", "${port}"),
    *("--context-tokens", "${context}", "--max-num-seqs", "${slots}", "--role", "${role}"),
)
_KEYED = {"backend": "vllm", "key_variable": "VLLM_API_KEY", "start_limit_s": 1800.0}
_OFFLINE = {"VLLM_NO_USAGE_STATS": "1"}

SHIPPED: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "vllm": {**_KEYED, "command": [*_VLLM], "environment": _OFFLINE, "roles": ["collocated"]},
        "vllm-prefill": {
            **_KEYED,
            "command": [*_VLLM, *_KV],
            "environment": _OFFLINE,
            "roles": ["prefill"],
            "spec": {"kv_role": "kv_both"},
        },
        "vllm-decode": {
            **_KEYED,
            "command": [*_VLLM, *_KV],
            "environment": _OFFLINE,
            "roles": ["decode"],
            "spec": {"kv_role": "kv_both"},
        },
        "sglang": {
            "backend": "sglang",
            "command": [*_SGLANG],
            "environment": {},
            "roles": ["collocated"],
            "health_path": "/model_info",
            "start_limit_s": 1800.0,
        },
        "reference": {
            "backend": "reference",
            "command": [*_REFERENCE],
            "environment": {},
            "roles": ["collocated", "prefill", "decode"],
            "key_variable": "ENGINE_API_KEY",
            "start_limit_s": 180.0,
        },
    }
)
