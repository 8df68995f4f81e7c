"""Prompt lengths by a model's own tokenizer, built here; what is missing or broken leaves the estimate."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from api.openai.status import gauges, health
from api.openai.tokenizers import HuggingFace, Tokenizers, Unusable
from controller.core.snapshot import GatewaySnapshot, ModelConfig
from controller.predict.lengths import MESSAGE_TOKENS
from tests.api.openai.gateways import Client, TestBed, completion, snapshot
from workers.backends.fake import Script

WORDS = ["<unk>", "<s>", "one", "two", "three"]


def write(folder: Path, *, words: Sequence[str] = WORDS) -> Path:
    """A token a word, `<s>` before a text where special tokens are wanted; cut to two tokens if it were left to it."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(2)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def model(path: Path | str, **more: Any) -> ModelConfig:
    return ModelConfig("demo", ("gpt",), context_tokens=50, tokenizer=str(path), **more)


def config(path: Path | str) -> GatewaySnapshot:
    return snapshot(models=(model(path),))


async def states(*configured: ModelConfig) -> dict[str, str]:
    tokenizers = Tokenizers()
    tokenizers.configure(configured)
    assert set(tokenizers.states().values()) <= {"loading"}
    await tokenizers.settle()
    return tokenizers.states()


@pytest.mark.parametrize("folder", [True, False])
def test_texts_are_counted_whole_with_or_without_what_is_put_around_them(tmp_path: Path, folder: bool) -> None:
    path = write(tmp_path)
    tokenizer = HuggingFace(str(tmp_path if folder else path))
    assert tokenizer.count(["one two three", "four five"], special=False) == 5
    assert tokenizer.count(["one two three"], special=True) == 4


async def test_what_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.json").write_text('{"model": 5}')
    missing, broken = tmp_path / "none.json", tmp_path / "broken.json"
    assert await states(model(missing)) == {"demo": f"there is no file {missing}"}
    assert await states(model(tmp_path)) == {"demo": f"there is no file {tmp_path}/tokenizer.json"}
    assert (await states(model(broken)))["demo"].startswith(f"{broken} cannot be read: ")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "requirements/tokenizers.txt" in (await states(model(write(tmp_path))))["demo"]
    with pytest.raises(Unusable):
        HuggingFace(str(broken))


async def test_a_file_is_read_again_when_it_changed_and_forgotten_when_no_one_names_it(tmp_path: Path) -> None:
    loads: list[str] = []

    def load(path: str) -> HuggingFace:
        loads.append(path)
        return HuggingFace(path)

    path = write(tmp_path)
    tokenizers = Tokenizers(load)
    for _ in range(2):
        tokenizers.configure([model(path), ModelConfig("other")])
        await tokenizers.settle()
    assert (loads, tokenizers.states()) == ([str(path)], {"demo": "ready"})
    os.utime(path, (1, 1))
    tokenizers.configure([model(path)])
    await tokenizers.settle()
    assert len(loads) == 2
    path.unlink()
    tokenizers.configure([model(path)])
    await tokenizers.settle()
    assert tokenizers.states() == {"demo": f"there is no file {path}"}
    assert not tokenizers
    tokenizers.configure([model("")])
    assert tokenizers.states() == {}


async def predicted(bed: TestBed, body: dict[str, Any], path: str) -> int:
    """What the dispatcher is told of its prompt's length."""
    seen: list[int] = []
    arrive = bed.gateway.runtime.arrive

    def note(in_flight: Any, *avoid: Any) -> None:
        seen.append(in_flight.request.prompt_tokens)
        arrive(in_flight, *avoid)

    bed.gateway.runtime.arrive = note  # type: ignore[method-assign]
    client: Client = bed.send(body, path)
    answer = await client.done()
    assert answer.status == 200, answer.body
    return seen[-1]


@pytest.mark.parametrize(
    ("prompt", "more", "tokens"),
    [
        ("one two three", {}, 4),
        ("one two three", {"add_special_tokens": False}, 3),
        (["one two"], {}, 3),
        ([1, 2, 3, 4, 5], {}, 5),
    ],
)
async def test_a_gateway_counts_the_text_of_a_completion(
    tmp_path: Path, prompt: Any, more: dict[str, Any], tokens: int
) -> None:
    async with TestBed(config(write(tmp_path))) as bed:
        await bed.gateway.tokenizers.settle()
        assert await predicted(bed, completion(prompt=prompt, **more), "/v1/completions") == tokens


async def test_long_bodies_are_counted_too(tmp_path: Path) -> None:
    roomy = replace(model(write(tmp_path)), context_tokens=5_000)
    async with TestBed(snapshot(models=(roomy,))) as bed:
        await bed.gateway.tokenizers.settle()
        body = completion(prompt="one" + 10_000 * " " + "two")
        assert await predicted(bed, body, "/v1/completions") == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}] * 2}),
        ("/v1/responses", {"input": [{"role": "user", "content": "one two three"}] * 2}),
    ],
)
async def test_what_a_template_adds_is_learned_from_what_engines_count(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """An engine whose template adds five tokens a conversation and two a message."""
    async with TestBed(config(write(tmp_path))) as bed:
        await bed.gateway.tokenizers.settle()
        asked = {"model": "demo", **body}
        bed.every(Script(prompt_tokens=6 + 5 + 2 * 2))
        assert await predicted(bed, asked, path) == 6 + 2 * MESSAGE_TOKENS
        for _ in range(10):
            last = await predicted(bed, asked, path)
        assert last == 6 + 5 + 2 * 2


async def test_what_is_counted_must_fit_the_context(tmp_path: Path) -> None:
    async with TestBed(config(write(tmp_path))) as bed:
        await bed.gateway.tokenizers.settle()
        for words, limit, status in ((48, 1, 200), (49, 1, 400), (45, 4, 200), (45, 5, 400)):
            answer = await bed.ask(completion(prompt=words * "a ", max_tokens=limit))
            assert answer.status == status, (words, limit)
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")
        assert "46 tokens" in answer.error["message"]
        answer = await bed.ask(completion(prompt=2_000 * "a "))
        assert "about 1000 tokens" in answer.error["message"]  # not counted: no text of that length can fit


async def test_without_its_file_a_model_is_estimated_and_that_is_visible(tmp_path: Path) -> None:
    missing = tmp_path / "tokenizer.json"
    async with TestBed(config(missing)) as bed:
        await bed.gateway.tokenizers.settle()
        assert await predicted(bed, completion(prompt=20 * "abcd"), "/v1/completions") == 20
        assert health(bed.gateway)[1]["tokenizers"] == {"demo": f"there is no file {missing}"}
        assert ready(bed) == [({"model": "demo"}, 0.0)]
        write(tmp_path)
        bed.gateway.configure(replace(bed.config, version=2))
        await bed.gateway.tokenizers.settle()
        assert health(bed.gateway)[1]["tokenizers"] == {"demo": "ready"}
        assert ready(bed) == [({"model": "demo"}, 1.0)]
        assert await predicted(bed, completion(prompt=20 * "abcd"), "/v1/completions") == 2


def ready(bed: TestBed) -> list[tuple[dict[str, str], float]]:
    return [(labels, value) for name, _, labels, value in gauges(bed.gateway) if name == "tokenizer_ready"]


async def test_a_tokenizer_that_fails_on_a_prompt_leaves_the_estimate() -> None:
    class Failing:
        def count(self, texts: Sequence[str], *, special: bool) -> int:
            raise ValueError("no")

    tokenizers = Tokenizers(lambda path: Failing())
    tokenizers.configure([model("/any")])
    await tokenizers.settle()
    assert tokenizers.states() == {"demo": "ready"}
    assert tokenizers.count(model("/any"), ["one"], special=True) is None
