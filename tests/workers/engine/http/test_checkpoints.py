"""Checkpoints at a real engine process: branches that share an answer's KV, leases, release, what is refused."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, metric, post
from tests.workers.engine.process import FLEET, EngineProcess

PROMPT = list(range(1000, 1100))  # seven blocks of 14 tokens and two


@pytest.fixture(scope="module")
def engine():
    sizes = ("--block-size", "14", "--kv-blocks", "256", "--max-model-len", "512")
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", *sizes, token=FLEET["token"]) as found:
        yield found


@pytest.fixture
async def http(engine):
    async with aiohttp.ClientSession(engine.url) as session:
        yield session
        await post(session, "/kv/release", {"request_ids": ["step"], **FLEET})
        await until_on_loop(lambda: unpinned(session), within_s=5)


async def figure(http, name):
    async with http.get("/metrics") as response:
        text = await response.text()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"slackline_{name} "))


async def unpinned(http):
    return not await figure(http, "kv_checkpoint_blocks")


async def step(http, **fields):
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "request_id": "step", "kv_checkpoint": 60, **fields}
    return await complete(http, **body)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_branches_share_the_kv_up_to_the_last_token(http):
    await step(http)
    assert await figure(http, "kv_checkpoints") == 1
    assert await figure(http, "kv_checkpoint_blocks") == 8  # 105 tokens with KV
    bodies = [{"prompt": [*PROMPT, number], "max_tokens": 3, "kv_branch_of": "step"} for number in range(8)]
    answers = await asyncio.gather(*(complete(http, **body) for body in bodies))
    assert [cached(answer) for answer in answers] == [100] * 8
    without = await complete(http, prompt=[*PROMPT, 9], max_tokens=3)
    assert cached(without) == 98, "of blocks that are full, as without a checkpoint"
    assert await figure(http, "kv_branches") == 8


async def test_the_answer_of_a_branch_is_that_of_the_whole_prompt(http):
    await step(http)
    alone = await complete(http, prompt=[*PROMPT, 5], max_tokens=8, seed=1)
    as_branch = await complete(http, prompt=[*PROMPT, 5], max_tokens=8, seed=1, kv_branch_of="step")
    assert alone["choices"] == as_branch["choices"]


async def test_a_branch_of_evicted_kv_is_computed_says_the_same_and_leaves_no_block(http):
    """Answers that need all blocks as they grow take those of the checkpoint, and all that the prefix cache had."""
    branch = {"prompt": [*PROMPT, 5], "max_tokens": 8, "seed": 1, "kv_branch_of": "step"}
    await step(http)
    held = await complete(http, **branch)
    assert cached(held) == 100
    others = [list(range(first, first + 400)) for first in range(2000, 6000, 500)]  # from 29 to 37 blocks, of all 256
    await asyncio.gather(*(complete(http, prompt=prompt, max_tokens=110, ignore_eos=True) for prompt in others))
    assert await unpinned(http)
    again = await complete(http, **branch)
    assert (cached(again), again["choices"]) == (0, held["choices"])
    assert (await post(http, "/kv/renew", {"request_id": "step", **FLEET}))[0] == 404
    assert await metric(http, "kv_cache_usage_perc") == 0, "leaked_blocks"


async def test_a_lease_ends_a_checkpoint_and_a_renewal_keeps_it(http):
    await step(http, kv_checkpoint=0.5)
    status, answer = await post(http, "/kv/renew", {"request_id": "step", "lease_s": 60, **FLEET})
    assert (status, answer) == (200, {"lease_s": 60})
    await asyncio.sleep(0.7)
    assert await figure(http, "kv_checkpoints") == 1
    assert (await post(http, "/kv/renew", {"request_id": "step", "lease_s": 0.1, **FLEET}))[0] == 200
    await until_on_loop(lambda: unpinned(http), within_s=5)
    status, answer = await post(http, "/kv/renew", {"request_id": "step", **FLEET})
    assert (status, answer["error"]["param"]) == (404, "request_id")


async def test_a_checkpoint_is_released_by_the_id_of_its_request(http):
    await step(http)
    status, answer = await post(http, "/kv/release", {"request_ids": ["step", "unknown"], **FLEET})
    assert (status, answer) == (200, {"released": 1})
    assert await unpinned(http)
    later = await complete(http, prompt=[*PROMPT, 5], max_tokens=3, kv_branch_of="step")
    assert cached(later) == 98, "it is computed, with what the prefix cache has"


async def test_another_salt_finds_none(http):
    await step(http, cache_salt="acme")
    other = await complete(http, prompt=[*PROMPT, 5], max_tokens=3, kv_branch_of="step", cache_salt="other")
    assert cached(other) == 0
    own = await complete(http, prompt=[*PROMPT, 5], max_tokens=3, kv_branch_of="step", cache_salt="acme")
    assert cached(own) == 100


async def test_a_client_that_hangs_up_leaves_no_checkpoint(http):
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "request_id": "step", "kv_checkpoint": 60}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(http, COMPLETIONS, body), 0.2)
    await asyncio.sleep(0.1)
    assert await unpinned(http)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_checkpoint", "x"), ("kv_checkpoint", -1), ("kv_checkpoint", 1e9), ("kv_branch_of", 5)],
)
async def test_bad_input_names_its_field(http, field, value):
    status, answer = await post(http, COMPLETIONS, {"prompt": "a", field: value})
    assert (status, answer["error"]["param"]) == (400, field)


async def test_only_the_fleet_releases_and_renews(http):
    for path in ("/kv/release", "/kv/renew"):
        status, _ = await post(http, path, {"request_ids": ["step"]})
        assert status in (401, 403)
