"""Health, models, tokenizer, metrics, sleep and pause of a real engine process."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, metric, post, samples
from tests.workers.engine.process import FLEET, EngineProcess
from workers.engine.http.management import Management
from workers.http.fleet_proof import PROOF

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
)
COUNTERS = (
    *("num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens_by_source", "prompt_tokens_cached", "request_success", "admission_rejections"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "iteration_tokens_total"),
    *("request_num_preemptions", "request_prefill_kv_computed_tokens"),
)


async def get(http, path):
    async with http.get(path) as response:
        assert response.status == 200
        return await response.json(content_type=None)


@pytest.fixture
async def awake(http):
    """Whatever a test leaves asleep or paused runs again."""
    yield http
    await post(http, "/wake_up", FLEET)
    await post(http, "/resume", FLEET)


async def test_models_name_the_context(http):
    (card,) = (await get(http, "/v1/models"))["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_200_and_empty(http, path):
    async with http.get(path) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_liveness_depends_on_nothing_and_tells_nothing(http):
    for path, told in (("/livez", b"ok\n"), ("/livez?x=1", b"ok\n")):
        async with http.get(path) as response:
            assert (response.status, await response.read()) == (200, told)
            assert response.headers["content-type"].startswith("text/plain")
    async with http.post("/livez", data=b"x") as response:
        assert response.status == 405


async def test_an_engine_that_has_failed_still_lives():
    """A probe of its process: who restarts it for /livez would end the messages that say why it failed."""
    failed = Management.__new__(Management)
    failed._engine = SimpleNamespace(failed=True)
    answers = []

    class Kept:
        async def answer(self, data, status=200, content_type=b"", *headers):
            answers.append((status, data))

    await failed.health(Kept())
    await failed.live(Kept())
    assert answers == [(503, b""), (200, b"ok\n")]


async def test_version_and_load(http):
    assert "version" in await get(http, "/version")
    assert await get(http, "/load") == {"server_load": 0}
    task = asyncio.create_task(complete(http, max_tokens=100, ignore_eos=True))
    await until_on_loop(lambda: _loaded(http), what="the request is counted")
    await task
    assert await get(http, "/load") == {"server_load": 0}


async def _loaded(http):
    return await get(http, "/load") == {"server_load": 1}


async def test_server_info_tells_sizes_and_latency(http):
    info = await get(http, "/server_info")
    assert info["profile"]["latency"] == {
        **dict.fromkeys(("prefill_b", "prefill_c", "decode_b", "decode_c"), 0.0),
        **dict.fromkeys(("prefill_a", "decode_a"), 0.002),
    }
    assert (info["engine"]["max_num_seqs"], info["engine"]["kv_blocks"]) == (4, 128)
    assert (info["role"], info["executor"], info["tokenizer"]) == ("collocated", "emulated", "utf8-chunk4")


async def test_tokenize_and_back(http):
    _, answer = await post(http, "/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert (answer["count"], answer["max_model_len"]) == (3, 512)
    assert "".join(answer["token_strs"]) == "hello world"
    _, back = await post(http, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "hello world"}


async def test_tokenize_counts_a_chat_as_generation_does(http):
    messages = [{"role": "user", "content": "hello there"}]
    _, counted = await post(http, "/tokenize", {"messages": messages})
    _, answer = await post(http, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert counted["count"] == answer["usage"]["prompt_tokens"]


async def test_metrics_have_vllm_s_names_and_labels(http):
    await complete(http, max_tokens=2, ignore_eos=True)
    async with http.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    for name in (*GAUGES, *(f"{name}_total" for name in COUNTERS), *(f"{name}_bucket" for name in HISTOGRAMS)):
        assert f"vllm:{name}{{" in text, name
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="128"' in text
    assert "_created" not in text


async def test_metrics_have_vllm_s_buckets(http):
    found = await samples(http)
    ttft = [label for name, label in found if name == "vllm:time_to_first_token_seconds_bucket"]
    assert [ttft[0], ttft[8], ttft[-2]] == ["0.001", "0.25", "2560.0"]
    lengths = [label for name, label in found if name == "vllm:request_prompt_tokens_bucket"]
    assert lengths == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]


async def test_metrics_count_what_was_done(http):
    before = await samples(http)
    await complete(http, prompt=list(range(500, 540)), max_tokens=3, ignore_eos=True)
    await complete(http, prompt=list(range(500, 540)), max_tokens=3, ignore_eos=True)
    after = await samples(http)

    def grown(name, label=""):
        return after[f"vllm:{name}", label] - before[f"vllm:{name}", label]

    assert grown("prompt_tokens_total") == 80
    assert grown("generation_tokens_total") == 6
    assert (grown("prefix_cache_queries_total"), grown("prefix_cache_hits_total")) == (80, 32)
    assert grown("prompt_tokens_by_source_total", "local_cache_hit") == 32
    assert grown("prompt_tokens_by_source_total", "local_compute") == 48
    assert grown("request_success_total", "length") == 2
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 4
    assert grown("e2e_request_latency_seconds_count") == 2
    early = 2 * 0.001  # the event loop's timers count milliseconds, so each last step may end by one too soon
    assert 0.012 - early <= grown("e2e_request_latency_seconds_sum") < 0.1


async def test_sleep_ends_what_runs_queues_what_comes_and_wakes(awake):
    http = awake
    running = asyncio.create_task(complete(http, max_tokens=400, ignore_eos=True))
    await until_on_loop(lambda: _running(http, 1), what="it runs")
    assert await post(http, "/sleep?level=1", FLEET) == (200, {"status": "sleeping", "level": 1})
    assert (await running)["choices"][0]["finish_reason"] == "abort"
    assert await get(http, "/is_sleeping") == {"is_sleeping": True}
    assert await metric(http, "engine_sleep_state", "weights_offloaded") == 1
    assert await get(http, "/health") is None
    queued = asyncio.create_task(complete(http, max_tokens=2, ignore_eos=True))
    await until_on_loop(lambda: _waiting(http, 1), what="it waits")
    assert await post(http, "/wake_up?tags=weights", FLEET) == (200, {"status": "sleeping", "tags": ["weights"]})
    assert await post(http, "/wake_up?tags=kv_cache", FLEET) == (200, {"status": "awake", "tags": ["kv_cache"]})
    assert (await queued)["usage"]["completion_tokens"] == 2
    assert await metric(http, "engine_sleep_state", "awake") == 1


async def test_a_sleeper_gives_up_no_less_when_it_is_told_to_again(awake):
    """Neither a pause nor a lighter sleep makes weights of nothing."""
    http = awake
    await post(http, "/sleep?level=2", FLEET)
    for level in (1, 0):
        await post(http, f"/sleep?level={level}", FLEET)
        assert await metric(http, "engine_sleep_state", "discard_all") == 1, level
    weights = await get(http, "/weights")
    assert (weights["state"], weights["host_copy"]) == ("absent", False)
    assert await post(http, "/wake_up?tags=kv_cache", FLEET) == (200, {"status": "sleeping", "tags": ["kv_cache"]})
    await post(http, "/wake_up?tags=weights", FLEET)
    assert [each["kind"] for each in (await get(http, "/weights"))["attempts"]] == ["disk"]


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/pause", "/resume", "/abort_requests"])
async def test_what_stops_an_engine_is_for_the_fleet_only(http, path):
    task = asyncio.create_task(complete(http, max_tokens=50, ignore_eos=True))
    await until_on_loop(lambda: _running(http, 1), what="it runs")
    for body in ({}, {"token": "guess"}, {"token": ""}):
        status, said = await post(http, path, body)
        assert (status, said["error"]["param"]) == (403, PROOF)
    async with http.post(path) as response:  # no body at all
        assert response.status == 403
    assert (await task)["choices"][0]["finish_reason"] == "length"


async def test_an_engine_without_a_token_is_stopped_by_no_one():
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", token="") as engine:
        async with aiohttp.ClientSession(engine.url) as http:
            status, said = await post(http, "/sleep", FLEET)
            assert (status, "FLEET_TOKEN" in said["error"]["message"]) == (403, True)
            assert await get(http, "/is_sleeping") == {"is_sleeping": False}


async def _running(http, count):
    return await metric(http, "num_requests_running") == count


async def _waiting(http, count):
    return await metric(http, "num_requests_waiting") == count


async def test_sleep_with_keep_gives_back_kv_and_loses_no_token(awake):
    http = awake
    whole = await complete(http, max_tokens=200, seed=4, ignore_eos=True)
    task = asyncio.create_task(complete(http, max_tokens=200, seed=4, ignore_eos=True))
    await until_on_loop(lambda: _running(http, 1), what="it runs")
    await post(http, "/sleep?level=2&mode=keep", FLEET)
    await until_on_loop(lambda: _waiting(http, 1), what="it is back in the queue")
    assert await metric(http, "kv_cache_usage_perc") == 0
    await post(http, "/wake_up", FLEET)
    assert (await task)["choices"] == whole["choices"]


async def test_sleep_with_wait_lets_what_runs_finish(awake):
    task = asyncio.create_task(complete(awake, max_tokens=100, ignore_eos=True))
    await until_on_loop(lambda: _running(awake, 1), what="it runs")
    await post(awake, "/sleep?mode=wait", FLEET)
    assert (await task)["usage"]["completion_tokens"] == 100


async def test_pause_refuses_and_resume_serves(awake):
    http = awake
    assert await post(http, "/pause", FLEET) == (200, {"status": "paused"})
    assert await get(http, "/is_paused") == {"is_paused": True}
    assert (await post(http, COMPLETIONS, {"prompt": "x"}))[0] == 503
    await post(http, "/resume", FLEET)
    assert await get(http, "/is_paused") == {"is_paused": False}
    assert await complete(http, max_tokens=1)


async def test_pause_with_keep_freezes_and_queues(awake):
    http = awake
    task = asyncio.create_task(complete(http, max_tokens=300, ignore_eos=True))
    await until_on_loop(lambda: _running(http, 1), what="it runs")
    await post(http, "/pause?mode=keep", FLEET)
    queued = asyncio.create_task(complete(http, max_tokens=1))
    await until_on_loop(lambda: _waiting(http, 1), what="it waits")
    assert await metric(http, "num_requests_running") == 1
    await post(http, "/resume", FLEET)
    assert (await task)["usage"]["completion_tokens"] == 300
    assert (await queued)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("name", ["cmpl-victim", "victim"])
async def test_requests_can_be_aborted_by_name(http, name):
    task = asyncio.create_task(complete(http, request_id="victim", max_tokens=400, ignore_eos=True))
    other = asyncio.create_task(complete(http, request_id="other", max_tokens=100, ignore_eos=True))
    await until_on_loop(lambda: _running(http, 2), what="both run")
    await post(http, "/abort_requests", {**FLEET, "request_ids": [name]})
    assert (await task)["choices"][0]["finish_reason"] == "abort"
    assert (await other)["choices"][0]["finish_reason"] == "length"


async def test_resetting_the_prefix_cache_forgets(http):
    ids = list(range(700, 740))
    await complete(http, prompt=ids, max_tokens=1)
    assert await post(http, "/reset_prefix_cache", FLEET) == (200, {"success": True})
    answer = await complete(http, prompt=ids, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
