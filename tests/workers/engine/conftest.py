from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from tests.workers.engine.process import FLEET, EngineProcess


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(
        *("--profile", "constant:2ms", "--model", "tiny", "--max-num-seqs", "4", "--max-model-len", "512"),
        *("--kv-blocks", "128", "--max-num-queued-reqs", "8", "--shutdown-timeout", "0"),
        token=FLEET["token"],
    ) as process:
        yield process


@pytest.fixture
async def http(engine: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url) as session:
        yield session


@pytest.fixture
async def sessions(engines: dict[str, EngineProcess]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    """One for each of the module's `engines`."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(aiohttp.ClientSession(engine.url)) for name, engine in engines.items()
        }
