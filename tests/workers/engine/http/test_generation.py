"""The two generation endpoints of a real engine process: shapes, ends, determinism, what clients may ask for."""

import asyncio
import time

import aiohttp
import pytest

from benchmarks.load.lengths import emulated
from tests.waiting import until_on_loop
from tests.workers.engine.client import CHAT, COMPLETIONS, complete, metric, post, streamed
from tests.workers.engine.process import FLEET, EngineProcess

HELLO = [{"role": "user", "content": "hello there"}]


async def test_a_completion_has_openai_shape(http):
    answer = await complete(http, max_tokens=3, ignore_eos=True)
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert len(choice["text"]) == 12
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 3, 5)


async def test_a_chat_completion_has_openai_shape(http):
    status, answer = await post(http, CHAT, {"messages": HELLO, "max_completion_tokens": 3, "ignore_eos": True})
    assert status == 200
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    message = answer["choices"][0]["message"]
    assert (message["role"], len(message["content"])) == ("assistant", 12)


async def test_a_stream_has_one_event_a_token_then_usage_then_done(http):
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *chunks, usage = await streamed(http, COMPLETIONS, body)
    assert len(chunks) == 5
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    whole = await complete(http, max_tokens=5, ignore_eos=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


async def test_a_chat_stream_starts_with_the_role(http):
    first, *chunks = await streamed(http, CHAT, {"messages": HELLO, "max_tokens": 4, "ignore_eos": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    assert len(chunks) == 4
    assert all(len(chunk["choices"][0]["delta"]["content"]) == 4 for chunk in chunks)


async def test_without_include_usage_there_is_none(http):
    chunks = await streamed(http, COMPLETIONS, {"prompt": "hello", "max_tokens": 2})
    assert [chunk for chunk in chunks if chunk["choices"]]
    assert all("usage" not in chunk for chunk in chunks)


async def test_text_is_the_same_for_a_seed_and_differs_between_seeds(http):
    texts = [
        (await complete(http, max_tokens=8, seed=seed, ignore_eos=True))["choices"][0]["text"] for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_text_does_not_depend_on_what_runs_beside_it(http):
    alone = await complete(http, max_tokens=12, seed=3, ignore_eos=True)
    crowd = await asyncio.gather(
        *(complete(http, max_tokens=12, seed=3, ignore_eos=True, prompt="hello") for _ in range(6))
    )
    assert {answer["choices"][0]["text"] for answer in crowd} == {alone["choices"][0]["text"]}


async def test_text_ends_by_itself_with_stop(http):
    answers = await asyncio.gather(*(complete(http, max_tokens=400, prompt=f"prompt {n}") for n in range(3)))
    assert "stop" in {answer["choices"][0]["finish_reason"] for answer in answers}
    again = await complete(http, max_tokens=400, prompt="prompt 0")
    assert again["usage"]["completion_tokens"] == answers[0]["usage"]["completion_tokens"]


async def test_streamed_events_count_the_end_of_sequence_as_usage_does(http):
    body = {"prompt": "prompt 0", "max_tokens": 400, "stream_options": {"include_usage": True}}
    *chunks, usage = await streamed(http, COMPLETIONS, body)
    assert len(chunks) == usage["usage"]["completion_tokens"]


async def test_a_stop_string_cuts_the_text_and_is_named(http):
    whole = (await complete(http, max_tokens=20, ignore_eos=True))["choices"][0]["text"]
    stop = whole[21:26]
    answer = await complete(http, max_tokens=20, ignore_eos=True, stop=["not in there", stop])
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == whole[: whole.index(stop)]
    assert answer["usage"]["completion_tokens"] < 20
    kept = await complete(http, max_tokens=20, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == choice["text"] + stop
    chunks = await streamed(http, COMPLETIONS, {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_min_tokens_puts_the_natural_end_off(http):
    natural = await complete(http, max_tokens=400, prompt="prompt 0")
    least = natural["usage"]["completion_tokens"] + 5
    answer = await complete(http, max_tokens=400, prompt="prompt 0", min_tokens=least)
    assert answer["usage"]["completion_tokens"] == least + 1


async def test_token_ids_are_a_prompt(http):
    answer = await complete(http, prompt=[1, 2, 3, 1023], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 4


async def test_chat_takes_text_parts_and_fills_the_context_by_default(http):
    parts = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    status, answer = await post(http, CHAT, {"messages": parts, "ignore_eos": True})
    assert status == 200
    assert answer["usage"]["total_tokens"] == 512


async def test_names_come_from_header_then_body(http):
    body = {"prompt": "x", "max_tokens": 1, "request_id": "from-body"}
    assert (await post(http, COMPLETIONS, body))[1]["id"] == "cmpl-from-body"
    assert (await post(http, COMPLETIONS, body, **{"X-Request-Id": "from-header"}))[1]["id"] == "cmpl-from-header"


async def test_a_name_may_be_used_twice_at_once(http):
    answers = await asyncio.gather(*(complete(http, request_id="same", max_tokens=5) for _ in range(2)))
    assert [answer["id"] for answer in answers] == ["cmpl-same"] * 2


async def test_unknown_fields_are_ignored(http):
    assert await complete(http, max_tokens=1, vllm_xargs={"a": 1}, session_id="s", top_k=5, temperature=0)


async def test_a_repeated_prompt_hits_the_prefix_cache_unless_salted(http):
    ids = list(range(200, 264))
    await complete(http, prompt=ids, max_tokens=1)
    hit = await complete(http, prompt=ids, max_tokens=1)
    salted = await complete(http, prompt=ids, max_tokens=1, cache_salt="tenant-b")
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def _is(http: aiohttp.ClientSession, name: str, value: float) -> bool:
    return await metric(http, name) == value


async def _queue(http: aiohttp.ClientSession, count: int, **body: object) -> list[asyncio.Task[dict]]:
    """Requests that wait in a paused engine."""
    before = await metric(http, "num_requests_waiting")
    tasks = [asyncio.create_task(complete(http, **body)) for _ in range(count)]
    await until_on_loop(lambda: _is(http, "num_requests_waiting", before + count), what="they wait")
    return tasks


async def test_lower_priorities_go_first_and_the_header_wins():
    ended: list[str] = []

    async def one(name: str, priority: int, **headers: str) -> None:
        body = {"prompt": name, "max_tokens": 1, "priority": priority}
        assert (await post(http, COMPLETIONS, body, **headers))[0] == 200
        ended.append(name)

    with EngineProcess("--profile", "constant:20ms", "--max-num-seqs", "1", token=FLEET["token"]) as engine:
        async with aiohttp.ClientSession(engine.url) as http:
            await post(http, "/pause?mode=keep", FLEET)
            wanted = (("lazy", 9, {}), ("middle", 5, {}), ("urgent", 0, {}), ("header", 50, {"X-Vllm-Priority": "-1"}))
            tasks = [asyncio.create_task(one(name, rank, **headers)) for name, rank, headers in wanted]
            await until_on_loop(lambda: _is(http, "num_requests_waiting", 4), what="they wait")
            await post(http, "/resume", FLEET)
            await asyncio.gather(*tasks)
    assert ended == ["header", "urgent", "middle", "lazy"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_hang_up_aborts_in_the_scheduler_and_frees_kv(http, path):
    ended = await metric(http, "request_success_total", "abort")
    body = {"prompt": "hello", "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with http.post(path, json=body) as response:
        await response.content.readany()
        assert await metric(http, "kv_cache_usage_perc") > 0
        response.close()
    await until_on_loop(lambda: _is(http, "num_requests_running", 0), what="no supervisor runs")
    assert await metric(http, "kv_cache_usage_perc") == 0
    assert await metric(http, "request_success_total", "abort") == ended + 1


async def test_a_hang_up_before_an_unstreamed_answer_aborts_too(http):
    task = asyncio.create_task(complete(http, max_tokens=400, ignore_eos=True))
    await until_on_loop(lambda: _is(http, "num_requests_running", 1), what="it runs")
    task.cancel()
    await until_on_loop(lambda: _is(http, "num_requests_running", 0), what="no supervisor runs")
    assert await metric(http, "kv_cache_usage_perc") == 0


async def test_a_full_queue_answers_503_before_any_byte(http):
    await post(http, "/pause?mode=keep", FLEET)
    tasks = await _queue(http, 12, max_tokens=1)  # four slots and a queue of eight
    status, answer = await post(http, COMPLETIONS, {"prompt": "x", "stream": True})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, 503, "ServiceUnavailableError")
    assert await metric(http, "admission_rejections_total", "max_num_queued_reqs") == 1
    await post(http, "/resume", FLEET)
    assert len(await asyncio.gather(*tasks)) == 12


async def test_tokens_do_not_come_faster_than_the_profile_says(http):
    begin = time.monotonic()
    chunks = await streamed(http, COMPLETIONS, {"prompt": "hello", "max_tokens": 101, "ignore_eos": True})
    assert len(chunks) == 101
    assert time.monotonic() - begin >= 101 * 0.002 - 0.002  # the timer's own resolution is a millisecond


async def test_an_answer_ends_at_the_length_that_min_tokens_and_stop_tokens_give(http):
    for tokens in (1, 2, 17, 64):
        answer = await complete(http, **emulated(tokens, 64))
        assert answer["usage"]["completion_tokens"] == tokens
        chunks = await streamed(http, COMPLETIONS, {"prompt": "hello", **emulated(tokens, 64)})
        assert len(chunks) == tokens
