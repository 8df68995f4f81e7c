"""kill -9 of a real vLLM server under load. Runs last: one of the two servers is gone afterwards."""

from __future__ import annotations

import random
import threading
import time

import pytest

from benchmarks.servers.stack import health

pytestmark = pytest.mark.vllm

LONG_PROMPT = 2000  # more than half a second of prefill each
COUNT = 12


def test_requests_without_a_token_finish_elsewhere(stack, servers, client_of):
    """Round robin puts half of the requests on the server that dies: they are retried, and none is lost."""
    outcomes: list[tuple[bool, str]] = []  # had a token before the kill, how it ended
    killed = threading.Event()

    def ask(client) -> None:
        prompt = [random.randrange(3, 1000) for _ in range(LONG_PROMPT)]
        options = {"max_tokens": 5, "ignore_eos": True, "stream": True, "slo_class": "patient"}
        response = client.post("/v1/completions", prompt=prompt, **options)
        lines = response.iter_lines()
        first = next(lines)
        early = not killed.is_set()
        rest = b"\n".join([first, *lines])
        ended = "error" if b'"error"' in rest else "done" if b"[DONE]" in rest else "cut"
        outcomes.append((early, ended))

    with stack.gateway("round_robin") as gateway:
        threads = [threading.Thread(target=ask, args=(client_of(gateway),)) for _ in range(COUNT)]
        for thread in threads:
            thread.start()
        time.sleep(0.8)
        servers[0].kill()
        killed.set()
        for thread in threads:
            thread.join(timeout=60)
        assert len(outcomes) == COUNT, "a request got no answer"
        assert [ended for early, ended in outcomes if not early and ended != "done"] == []
        # Those that had a token on the dead server may end with an error event, but never silently.
        assert {ended for _, ended in outcomes} <= {"done", "error"}
        assert sum(ended == "done" for _, ended in outcomes) > COUNT // 2
        assert health(gateway.url)["instances"]["engine-0"] == "down"
