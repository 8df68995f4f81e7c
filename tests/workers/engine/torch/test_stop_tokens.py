"""`stop_token_ids` with a real model: an answer ends with the first of them, whatever else the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from controller.engine import EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.workers.engine.client import CHAT, COMPLETIONS, complete, post, streamed
from tests.workers.engine.torch.bench import VOCABULARY, Bench, Interrupting, engine_config, folder, program, prompts
from workers.engine.torch.task import Boundary

pytestmark = [pytest.mark.torch, pytest.mark.long(30)]

TOKENS = 24
ASKED = prompts(6, seed=11, longest=16)


def bench(**settings: int) -> Bench:
    blocks = settings.get("blocks", 64)
    scheduler = EngineScheduler(engine_config(**settings), BATCHINGS["chunked_prefill"]())
    return Bench(program(folder(), blocks), scheduler)


def said(made: Bench, **fields: Any) -> dict[str, list[int]]:
    """`fields`: of each sequence by its name."""
    for name, prompt in enumerate(ASKED):
        made.add(str(name), prompt, TOKENS, seed=name, **fields.get(str(name), {}))
    tokens = made.run()
    made.close()
    return tokens


@pytest.fixture(scope="module")
def free() -> dict[str, list[int]]:
    """What is said where nothing stops it."""
    return said(bench())


def stops(free: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Each sequence stops at another place; one of them by a token that only others say, so not at all."""
    own = {name: {"stop_tokens": frozenset({tokens[int(name) + 6]})} for name, tokens in free.items()}
    return own | {"5": {"stop_tokens": frozenset(set(free["1"]) - set(free["5"]))}}


def cut(tokens: list[int], stops: frozenset[int], least: int = 0) -> list[int]:
    """Up to the first of them."""
    at = next((at for at, token in enumerate(tokens) if token in stops and at >= least), len(tokens))
    return tokens[: at + 1]


def test_each_sequence_has_its_own_batched_cut_recomputed_and_suspended(free: dict[str, list[int]]) -> None:
    asked = stops(free)
    wanted = {name: cut(tokens, asked[name]["stop_tokens"]) for name, tokens in free.items()}
    assert len({*map(len, wanted.values())}) > 2, "they end at different places"
    assert wanted["5"] == free["5"]
    assert said(bench(), **asked) == wanted
    tight = bench(blocks=14, max_model_len=56, max_num_batched_tokens=8)
    assert said(tight, **asked) == wanted
    assert tight.scheduler.totals.preemptions > 0
    left = bench()
    left.executor.close()
    left.executor = Interrupting(program(folder()), left.events, Boundary.OPERATOR)
    assert said(left, **asked) == wanted
    assert left.executor.suspensions > 0


def test_they_hold_where_the_models_end_is_ignored_and_not_before_min_tokens(free: dict[str, list[int]]) -> None:
    one = frozenset({free["0"][4]})
    assert said(bench(), **{"0": {"stop_tokens": one, "ignore_eos": True}})["0"] == cut(free["0"], one)
    longer = said(bench(), **{"0": {"stop_tokens": one, "min_tokens": 8}})["0"]
    assert len(longer) > 8
    assert free["0"][4] not in longer[:8], "not only does it not end there: it is not said"


# ---- as a client sees it ------------------------------------------------------------------------------------------

PROMPT = [(7 * i) % VOCABULARY for i in range(40)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="module", params=["continuous", "slackline"])
def engine_options(request: pytest.FixtureRequest) -> dict[str, Sequence[str]]:
    common = ("--executor", "torch", "--model", str(folder()), "--served-model-name", "demo", "--threads", "1")
    options = (*common, "--kv-cache-gib", "0.01", "--profile", "constant:2ms", "--shutdown-timeout", "0")
    options = (*options, "--scheduler", request.param)
    return {"p": (*options, "--role", "prefill"), "d": (*options, "--role", "decode")}


def generated() -> list[int]:
    made = Bench(program(folder()))
    made.add("a", PROMPT, TOKENS)
    ((tokens),) = made.run().values()
    made.close()
    return tokens


def choice(answer: dict[str, Any]) -> tuple[str, str, Any]:
    (one,) = answer["choices"]
    return one["text"], one["finish_reason"], one["stop_reason"]


async def test_the_answer_ends_before_the_token_and_names_it(sessions: dict[str, aiohttp.ClientSession]) -> None:
    tokens, http = generated(), sessions["d"]
    stop = tokens[5]
    told = cut(tokens, frozenset({stop}))
    whole = await complete(http, **BODY)
    texts = [chunk["choices"][0]["text"] for chunk in await streamed(http, COMPLETIONS, BODY)]
    before = "".join(texts[: len(told) - 1])
    for ignore in (False, True):
        answer = await complete(http, **BODY, stop_token_ids=[stop, tokens[-1], stop], ignore_eos=ignore)
        assert choice(answer) == (before, "stop", stop)
        assert answer["usage"]["completion_tokens"] == len(told)
    kept = await complete(http, **BODY, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert choice(kept) == ("".join(texts[: len(told)]), "stop", stop)
    chunks = await streamed(http, COMPLETIONS, {**BODY, "stop_token_ids": [stop]})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*texts[: len(told) - 1], ""]
    assert (chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["choices"][0]["stop_reason"]) == ("stop", stop)
    unmet = next(token for token in range(VOCABULARY) if token not in tokens)
    assert choice(await complete(http, **BODY, stop_token_ids=[unmet])) == choice(whole)
    assert choice(whole)[1:] == ("length", None)


async def test_answers_side_by_side_keep_to_their_own(sessions: dict[str, aiohttp.ClientSession]) -> None:
    tokens = generated()
    asked = [tokens[at] for at in (1, 4, 7, 9)]
    answers = await asyncio.gather(*(complete(sessions["d"], **BODY, stop_token_ids=[token]) for token in asked))
    for token, answer in zip(asked, answers, strict=True):
        assert choice(answer)[1:] == ("stop", token)
        assert answer["usage"]["completion_tokens"] == len(cut(tokens, frozenset({token})))


async def test_a_chat_has_them_too(sessions: dict[str, aiohttp.ClientSession]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    _, whole = await post(sessions["d"], CHAT, body)
    said = whole["choices"][0]["message"]["content"].encode()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert said, "nothing to stop at"
    first = int(said[1 : said.index(b">")]) if said.startswith(b"<") and b">" in said else said[0]
    status, answer = await post(sessions["d"], CHAT, {**body, "stop_token_ids": [first]})
    ended = answer["choices"][0]
    assert (status, ended["message"]["content"], ended["stop_reason"]) == (200, "", first)
    status, answer = await post(sessions["d"], CHAT, {**body, "stop_token_ids": [VOCABULARY]})
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids")


async def test_the_decode_engine_stops_and_a_first_token_that_stops_leaves_nothing_to_it(
    sessions: dict[str, aiohttp.ClientSession],
) -> None:
    tokens = generated()
    first = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    ended = await complete(sessions["p"], **{**first, "stop_token_ids": [tokens[0]]})
    assert choice(ended) == ("", "stop", tokens[0])
    assert ended["kv_transfer_params"] is None
    stop = next(token for token in tokens[1:] if token != tokens[0])
    asked = {"stop_token_ids": [stop]}
    begun = await complete(sessions["p"], **{**first, **asked})
    offer = {"kv_transfer_params": begun["kv_transfer_params"]}
    answer = await complete(sessions["d"], **BODY, **asked, **offer)
    assert choice(answer)[1:] == ("stop", stop)
    assert choice(answer) == choice(await complete(sessions["d"], **BODY, **asked))
