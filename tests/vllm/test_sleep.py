"""The sleep verbs at a real vLLM on CPUs, where it has no sleep mode: what it does, what it says, and how one knows.

That memory is really given back, and that weights really come back, needs a GPU: seen at a contract fake only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from benchmarks.servers.engines import MODEL_NAME, EngineStartFailed, RunningEngine, vllm_servers
from controller.models import Decision, Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import sleep_order
from tests import factories
from tests.waiting import until
from workers.actions import sleeping
from workers.actions.runner import advance_actions
from workers.actions.sleep_client import NoSleepMode, SleepClient, SleepState

pytestmark = pytest.mark.vllm

ASK = {"model": MODEL_NAME, "prompt": list(range(5, 60)), "max_tokens": 16, "ignore_eos": True, "temperature": 0}
AWAKE = SleepState(awake=True)


@pytest.fixture
def server(servers: list[RunningEngine]) -> Iterator[RunningEngine]:
    """Awake again at the end, whatever a test did to it. Its first `/server_info` takes seconds, the next ones none."""
    requests.get(f"{servers[0].url}/server_info", timeout=120)
    yield servers[0]
    requests.post(f"{servers[0].url}/wake_up", timeout=30)


@pytest.fixture
def client(server: RunningEngine) -> SleepClient:
    return SleepClient(server.url)


def text(server: RunningEngine, within_s: float = 60.0) -> str:
    answer = requests.post(f"{server.url}/v1/completions", json=ASK, timeout=within_s)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def held_mb(server: RunningEngine) -> float:
    """Resident memory of the server and its children."""
    process = psutil.Process(server.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)]) / 1e6


def until_awake(client: SleepClient) -> None:
    until(lambda: not client.look().moving)
    assert client.look() == AWAKE


def test_that_sleep_mode_is_off_shows_in_how_it_was_started(client: SleepClient):
    with pytest.raises(NoSleepMode, match="--enable-sleep-mode"):
        client.check_able(1)


@pytest.mark.thorough
def test_on_cpus_it_does_not_start_with_sleep_mode(tmp_path: Path):
    """So one that says it is on has it."""
    with (
        pytest.raises(EngineStartFailed, match="Sleep mode is not supported on current platform"),
        vllm_servers(1, tmp_path, arguments=("--enable-sleep-mode",)),
    ):
        pass


def test_level_1_is_told_and_answered_and_frees_nothing(server: RunningEngine, client: SleepClient):
    """What `check_able` is for: its word and its gauge say asleep."""
    before, held = text(server), held_mb(server)
    client.sleep(1)
    assert client.look() == SleepState(awake=False, level=1)
    assert abs(held_mb(server) - held) < 0.1 * held
    with pytest.raises(requests.ReadTimeout):  # paused it is: a request waits
        text(server, within_s=3)
    client.wake()
    until_awake(client)
    assert text(server) == before


def test_level_2_woken_in_its_four_steps_serves_the_same_text(server: RunningEngine, client: SleepClient):
    before = text(server)
    client.sleep(2)
    assert client.look() == SleepState(awake=False, level=2)
    client.wake("weights")
    assert not client.look().awake  # its KV cache is still said to be asleep
    client.reload()
    assert client.reset_prefix_cache()
    client.wake("kv_cache")
    until_awake(client)
    assert text(server) == before


@pytest.mark.db
@pytest.mark.django_db
def test_an_order_to_sleep_fails_and_says_why_and_it_serves_on(server: RunningEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sleeping, "SETTLE_S", 0.0)
    row = factories.instance(id="real", backend="vllm", provisioner="static", url=server.url)
    sleep_order(actor=SYSTEM, instance_id=row.pk)
    ended: list[Decision] = []
    until(lambda: ended.extend(advance_actions([])) or ended, 60)
    assert [(decision.kind, decision.reason) for decision in ended] == [("instance_sleep_failed", "no_sleep_mode")]
    assert Instance.objects.get(pk=row.pk).weights == "present"
    assert SleepClient(server.url).look() == AWAKE
    assert text(server)
