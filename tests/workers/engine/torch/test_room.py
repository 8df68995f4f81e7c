"""A warm engine may keep the memory for its weights: a load then only fills it (`--keep-room`)."""

from __future__ import annotations

import subprocess
import sys

import aiohttp
import pytest

from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import folder, program
from workers.engine import server
from workers.engine.config import parse
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.transfer import WeightMemory, reserve

pytestmark = pytest.mark.torch
OPTIONS = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
NAMED = ("--model", str(folder()), "--served-model-name", "tiny", "--shutdown-timeout", "0")


def held(keep_room: bool) -> WeightMemory:
    return WeightMemory(program(folder()).model.slots(), present=True, keep_room=keep_room)


def bytes_held(memory: WeightMemory) -> int:
    return sum(storage.nbytes() for storage, _ in memory._storages)


def test_released_weights_are_gone_and_their_room_is_kept_only_if_asked():
    kept, given_back = held(True), held(False)
    size, before = bytes_held(kept), kept.manifest()
    for memory in (kept, given_back):
        memory.release()
        assert not memory.present
        with pytest.raises(WeightsError, match="holds no weights"):
            memory.manifest()
    assert (bytes_held(kept), bytes_held(given_back)) == (size, 0)
    for memory in (kept, given_back):
        memory.load_disk(folder())
        assert memory.manifest() == before


def test_reserved_memory_is_touched():
    slots = program(folder()).model.slots()
    reserve(slots)
    assert all(not slot.memory.any() for slot in slots.values())


@pytest.mark.thorough
async def test_a_warm_engine_with_room_loads_from_another_and_says_the_same():
    ask = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    source = EngineProcess(*OPTIONS, *NAMED, token=FLEET["token"])
    warm = EngineProcess(*OPTIONS, *NAMED, "--weights", "absent", "--keep-room", token=FLEET["token"])
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

            async def asked(url: str, **body: object) -> dict:
                status, said = await post(session, url, {**FLEET, **body})
                assert status == 200, said
                return said

            async def text(of: EngineProcess) -> str:
                async with session.post(f"{of.url}/v1/completions", json=ask) as response:
                    return str((await response.json())["choices"][0]["text"])

            said = await text(source)
            for _ in range(2):  # the second time into memory that held weights
                sources = [{"kind": "engine", "url": source.url}]
                assert (await asked(f"{warm.url}/weights/load", sources=sources))["state"] == "present"
                assert await text(warm) == said
                await asked(f"{warm.url}/sleep?level=2")
    finally:
        source.stop()
        warm.stop()


def test_an_engine_without_room_does_not_start(monkeypatch, caplog):
    def refused(slots: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("workers.engine.torch.weights.transfer.reserve", refused)
    config = parse(["--port", "0", *OPTIONS, *NAMED, "--weights", "absent", "--keep-room"])
    with pytest.raises(SystemExit) as ended:
        server.run(config)
    assert ended.value.code == 1
    assert "not enough memory for the weights: DefaultCPUAllocator" in caplog.text


@pytest.mark.parametrize("options", [[], [*OPTIONS, *NAMED, "--tensor-parallel", "2"]])
def test_others_have_no_room_to_keep(options, capsys):
    with pytest.raises(SystemExit):
        parse(["--port", "0", "--keep-room", *options])
    assert "--keep-room: requires --executor torch and one rank" in capsys.readouterr().err


def resident_mb(*options: str) -> float:
    """Memory of a fresh process that makes the model's slots, and reserves them if told to."""
    code = (
        "import re, sys, torch\n"
        "from workers.engine.torch.weights.transfer import reserve\n"
        "from workers.engine.torch.weights.files import Slot\n"
        "slots = {'w': Slot(torch.empty(64 << 20, dtype=torch.uint8), (64 << 20,))}\n"
        "if 'reserve' in sys.argv: reserve(slots)\n"
        "print(re.search(r'VmRSS:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def test_reserved_memory_is_there_and_not_promised():
    assert resident_mb("reserve") - resident_mb() > 55
