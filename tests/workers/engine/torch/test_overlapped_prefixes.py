"""The same with a real model, whose prompts continue from KV that came while they were computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.engine.kv import test_overlapped_prefixes as cases
from tests.workers.engine.process import EngineProcess, fleet
from tests.workers.engine.proxy import ELSEWHERE
from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.test_borrowed_prefixes import DEARER_TO_COMPUTE

pytestmark = [pytest.mark.torch, pytest.mark.long(20)]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineProcess]]:
    model = folder("LlamaForCausalLM", *DEARER_TO_COMPUTE, "--layers", str(cases.LAYERS))
    options = ("--executor", "torch", "--model", str(model), "--threads", "1", "--kv-cache-gib", "0.04")
    options = (*options, "--profile", "constant:5ms", "--shutdown-timeout", "0")
    borrower = (*options, "--borrow-tokens", "64", "--scheduler", "preemptive")
    with fleet(source=(*options, "--advertise-host", ELSEWHERE), borrower=borrower) as found:
        yield found


globals().update({name: each for name, each in vars(cases).items() if name.startswith("test_")})
