"""`--tensor-parallel 2`: what two ranks say is what one says, and they live and die together."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time

import aiohttp
import psutil
import pytest

from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import folder

pytestmark = [pytest.mark.torch, pytest.mark.long(125)]
OPTIONS = ("--executor", "torch", "--kv-cache-gib", "0.01", "--block-size", "4", "--threads", "1")
TWO = ("--tensor-parallel", "2")
PROMPTS = [[(7 * i + 3 * j) % 500 for j in range(length)] for i, length in enumerate((300, 5, 64, 17, 120, 1, 33, 200))]
GONE_S = 20.0


def started(*options, model=None):
    named = ("--model", str(model or folder()), "--served-model-name", "tiny")
    return EngineProcess(*named, *OPTIONS, *options, token=FLEET["token"])


@pytest.fixture(scope="module", params=["continuous", "preemptive"])
def both(request):
    """One rank and two."""
    options = ("--scheduler", request.param)
    if request.param == "preemptive":  # as fast as the profile says, so that neither measures
        options += ("--profile", "constant:5ms")
    with started(*options) as one, started(*options, *TWO) as two:
        yield request.param, one, two


async def texts(engine, **options):
    async with aiohttp.ClientSession(engine.url) as http:

        async def ask(number, prompt):
            if number == 1:
                await asyncio.sleep(0.02)  # into the long prompt's prefill
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0, "target_ttft": 5.0}
            body |= {"target_ttft": 0.05} if number % 2 else {}
            status, said = await post(http, "/v1/completions", {"model": "tiny", **body, **options})
            assert status == 200, said
            return said["choices"][0]["text"]

        return await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(PROMPTS)))


async def rounds(engine):
    async with aiohttp.ClientSession(engine.url) as http, http.get("/server_info") as answer:
        return ((await answer.json())["preemption"] or {}).get("rounds", {})


@pytest.mark.sampled(1)
async def test_two_ranks_say_what_one_says(both):
    scheduler, one, two = both
    expected = await texts(one)
    assert len(set(expected)) > 1
    for _ in range(5):
        assert await texts(two) == expected
    if scheduler == "preemptive":
        assert (await rounds(two))["preempts"] > 0, await rounds(two)


@pytest.mark.thorough
async def test_two_ranks_that_measured_themselves_stop_together():
    """What they ran for that has boundaries too, which the first rank alone must not leave out."""
    with started("--scheduler", "preemptive", *TWO) as two:
        expected = await texts(two)
        for _ in range(20):
            if (await rounds(two))["preempts"] > 0:
                break
            assert await texts(two) == expected
        assert (await rounds(two))["preempts"] > 0, await rounds(two)


@pytest.mark.sampled(1)
async def test_they_sample_the_same(both):
    _, one, two = both
    asked = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    assert await texts(two, **asked) == await texts(one, **asked)


async def test_they_sleep_and_wake_together(both):
    _, _, two = both
    before = await texts(two)
    async with aiohttp.ClientSession(two.url) as http:
        for level, kind in ((1, "host"), (2, "disk")):
            assert (await post(http, f"/sleep?level={level}", FLEET))[0] == 200
            status, said = await post(http, "/wake_up", FLEET)
            assert status == 200, said
            async with http.get("/weights") as answer:
                assert [each["kind"] for each in (await answer.json())["attempts"]] == [kind]
            assert await texts(two) == before


async def test_their_kv_is_neither_given_nor_taken(both):
    """A rank has its heads only: refused with the reason, and nothing is queued or kept."""
    _, _, two = both
    offer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "r"}
    offer |= {"remote_num_tokens": 3, "first_token": 5}
    async with aiohttp.ClientSession(two.url) as http:
        for params in ({"do_remote_decode": True}, offer):
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": params}
            status, said = await post(http, "/v1/completions", body)
            assert (status, said["error"]["param"]) == (400, "kv_transfer_params")
            assert "tensor-parallel ranks" in said["error"]["message"]
        async with http.get("/links") as answer:
            assert await answer.json() == {"id": "", "at": None, "peers": [], "borrows": False}
        assert (await post(http, "/links", {**FLEET, "id": "two", "peers": []}))[0] == 409


async def test_their_weights_come_from_the_disk_and_other_ways_are_recorded_as_refused(both):
    _, one, two = both
    before = await texts(two)
    async with aiohttp.ClientSession(one.url) as whole, aiohttp.ClientSession(two.url) as http:
        for session, url in ((http, one.url), (whole, two.url)):  # from one to two, and from two to one
            await post(session, "/sleep?level=2", FLEET)
            sources = [{"kind": "engine", "url": url}, {"kind": "disk"}]
            status, said = await post(session, "/weights/load", {**FLEET, "sources": sources})
            assert (status, said["state"]) == (200, "present"), said
            refused, disk = said["attempts"]
            assert "several tensor-parallel ranks" in refused["error"]
            assert (disk["kind"], disk["error"]) == ("disk", "")
    assert await texts(two) == await texts(one) == before


# ---- life and death -------------------------------------------------------------------------------------------------


def others(engine):
    return psutil.Process(engine.process.pid).children(recursive=True)


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    return not alive


@pytest.mark.thorough
def test_what_ranks_open_for_each_other_is_open_to_this_host_only():
    with started(*TWO) as engine:
        processes = [psutil.Process(engine.process.pid), *others(engine)]
        found = [each for process in processes for each in process.net_connections("tcp")]
    assert {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_a_stop_that_was_asked_for_leaves_no_one():
    with started(*TWO) as engine:
        ranks = others(engine)
        assert len(ranks) == 1
        assert engine.stop() == 0
        assert gone(ranks)


def test_a_first_rank_that_is_killed_takes_the_other_with_it():
    with started(*TWO) as engine:
        ranks = others(engine)
        engine.process.kill()
        assert gone(ranks)


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_is_killed_ends_the_engine_and_says_why(busy):
    with started(*TWO) as engine:
        (rank,) = others(engine)
        client = subprocess.Popen([sys.executable, "-c", CLIENT, engine.url], stdout=subprocess.PIPE) if busy else None
        if client is not None:
            assert client.stdout.readline().strip() == b"first"
        os.kill(rank.pid, signal.SIGKILL)
        assert engine.process.wait(GONE_S) == 1
        lines = engine.last_words()
        assert lines[-1].endswith(
            "the engine failed and stops: rank 1 was killed by signal 9, and the model requires all ranks"
        ), lines[-3:]
        if client is not None:
            assert client.communicate(timeout=GONE_S)[0].strip() == b"ended"


CLIENT = """
import requests, sys
body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 450, "ignore_eos": True, "stream": True}
with requests.post(sys.argv[1] + "/v1/completions", json=body, stream=True, timeout=60) as answer:
    try:
        for number, line in enumerate(answer.iter_lines()):
            if number == 4:
                print("first", flush=True)
    except requests.RequestException:
        pass
print("ended", flush=True)
"""


def refused(*options, path=None):
    command = [sys.executable, "-m", "workers.engine", "--port", "0", "--model", str(path or folder()), *OPTIONS]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "listening" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--tensor-parallel", "3"), "--tensor-parallel: kv_heads=4 cannot be split over 3 ranks"),
        (("--tensor-parallel", "0"), "--tensor-parallel: must be at least 1"),
        (("--executor", "emulated", "--tensor-parallel", "2"), "--tensor-parallel: requires --executor torch"),
    ],
)
def test_what_cannot_be_split_is_refused(options, complaint):
    assert complaint in refused(*options)


def test_roles_that_move_kv_are_refused(fleet_token):
    assert "the role must be collocated" in refused(*TWO, "--role", "decode")


def test_a_truncated_file_is_named_and_no_one_is_left(tmp_path):
    path = shutil.copytree(folder(), tmp_path / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = set(psutil.pids())
    assert f"{weights} is not a complete safetensors file" in refused(*TWO, path=path)
    ends_at = time.monotonic() + GONE_S
    while any(_is_rank(pid) for pid in set(psutil.pids()) - before):
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def _is_rank(pid):
    try:
        return "workers.engine.torch.follower" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
