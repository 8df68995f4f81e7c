from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.workers.engine.process import EngineProcess


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(
        *("--profile", "constant:2ms", "--model", "tiny", "--max-num-seqs", "4", "--max-model-len", "512"),
        *("--kv-blocks", "128", "--max-num-queued-reqs", "8", "--shutdown-timeout", "0"),
    ) as process:
        yield process


@pytest.fixture
async def http(engine: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url) as session:
        yield session


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing torch takes seconds and may not even work: only for those who ask for it (`make test-torch`)."""
    if collection_path.name.startswith("test_torch_") and "not torch" in config.option.markexpr:
        return True
    return None
