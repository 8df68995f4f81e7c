"""What is tested of links and transfers without processes, on an engine's loop."""

from __future__ import annotations

from inspect import iscoroutinefunction, signature

import pytest

from tests.workers.engine.kv import test_damaged, test_link_connections, test_overlap
from tests.workers.engine.kv import test_disaggregation as test_handover

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])
link, probes = test_link_connections.link, test_link_connections.probes

for module in (test_damaged, test_handover, test_link_connections, test_overlap):
    for name, case in vars(module).items():
        if name.startswith("test_") and iscoroutinefunction(case) and "sessions" not in signature(case).parameters:
            assert name not in globals(), name
            globals()[name] = case
