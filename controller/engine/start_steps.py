"""The steps of an engine's start, as its log tells them.

The lines are those that vLLM 0.32 and SGLang 0.5 print; an engine that prints none of them is merely not followed
between its first and its last step. `process` and `ready` are not read from the log: they are the start of the process
and the first health check that succeeded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

PROCESS, READY = "process", "ready"
STEPS = (PROCESS, "weights", "graphs", "cache", "listening", READY)  # in their usual order
_SAID: Mapping[str, tuple[tuple[str, re.Pattern[str]], ...]] = MappingProxyType(
    {
        "vllm": (
            ("weights", re.compile(r"Loading weights took|Model loading took")),
            (
                "graphs",
                re.compile(r"Graph capturing finished|torch\.compile takes"),
            ),
            ("cache", re.compile(r"KV cache size:|Maximum concurrency for|init engine \(profile")),
            ("listening", re.compile(r"Application startup complete|Starting vLLM API server")),
        ),
        "sglang": (
            ("weights", re.compile(r"Load weight end")),
            ("graphs", re.compile(r"Capture .*graph end")),
            ("cache", re.compile(r"KV Cache is allocated")),
            ("listening", re.compile(r"Uvicorn running on|Application startup complete")),
        ),
        "reference": (("listening", re.compile(r"listening on|Listening on")),),
    }
)


def steps_said(backend: str, text: str) -> Iterator[str]:
    """Steps that a part of the log says are done."""
    for name, pattern in _SAID.get(backend, ()):
        if pattern.search(text):
            yield name


def patterns(backend: str) -> dict[str, str]:
    """The same for a reader elsewhere: what each step's line matches, as the text of a regular expression."""
    return {name: pattern.pattern for name, pattern in _SAID.get(backend, ())}
