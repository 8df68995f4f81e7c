"""A real vLLM with a reasoning parser: what it streams as reasoning is no answer, and a thinking deadline is judged by
that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import aiohttp
import pytest

from benchmarks.servers.engines import VLLM_HOME, vllm_missing, vllm_servers
from controller.core.types import InstanceSpec
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop

pytestmark = pytest.mark.vllm
BEGIN, END = "<think>", "</think>"
MODEL = "demo"
ARGUMENTS = (
    *("--served-model-name", MODEL),
    *("--reasoning-parser", "deepseek_r1"),
    *("--reasoning-config", json.dumps({"reasoning_start_str": BEGIN, "reasoning_end_str": END})),
)
BUDGET = 12  # tokens of reasoning, after which vLLM ends it


def reasoning_home(folder: Path) -> Path:
    """The tests' model, whose last two tokens begin and end reasoning, and whose template begins it."""
    folder.mkdir()
    (folder / "bin").symlink_to(VLLM_HOME / "bin")
    model = folder / "model"
    shutil.copytree(VLLM_HOME / "model", model)
    path = model / "tokenizer.json"
    made = json.loads(path.read_text())
    names = {number: name for name, number in made["model"]["vocab"].items()}
    for number, name in ((len(names) - 2, BEGIN), (len(names) - 1, END)):
        old = names[number]
        del made["model"]["vocab"][old]
        made["model"]["vocab"][name] = number
        merges = [each if isinstance(each, list) else each.split(" ") for each in made["model"]["merges"]]
        made["model"]["merges"] = [each for each in merges if "".join(each) != old]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        made["added_tokens"].append({"id": number, "content": name, **flags})
    path.write_text(json.dumps(made))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().rstrip() + BEGIN)
    return folder


@pytest.mark.thorough
async def test_what_it_streams_as_reasoning_is_judged_as_such(folder: Path) -> None:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    home = reasoning_home(folder / "reasoning")
    said = {"messages": [{"role": "user", "content": "def parse(text):"}], "max_tokens": 3 * BUDGET}
    chat = {"model": MODEL, "stream": True, "ignore_eos": True, "target_tbt": 30, **said}
    with vllm_servers(1, folder / "reasoning-logs", home, arguments=ARGUMENTS) as (server,):
        spec = InstanceSpec("e1", MODEL, url=server.url, backend="vllm")
        async with aiohttp.ClientSession() as session, ServerBed([spec], session) as bed:
            for due in (60, 0.001):
                body = {**chat, "thinking_deadline": due, "waiting_time": 60, "thinking_token_budget": BUDGET}
                answer = await bed.ask(body, "/v1/chat/completions")
                assert (answer.status, answer.events[-1]) == (200, "[DONE]"), answer.body
                await until_on_loop(lambda: bed.sink.records)
                record = bed.sink.records.pop()
                deltas = [each["choices"][0]["delta"] for each in map(json.loads, answer.events[:-1])]
                thought = sum("reasoning" in delta for delta in deltas)
                assert 0 < record.reasoning_tokens == thought <= BUDGET
                assert record.ttft_s < record.first_answer_s < record.e2e_s
                answered = sum(bool(delta) and "reasoning" not in delta and "role" not in delta for delta in deltas)
                paced_s = (answered - 1) * record.tpot_s
                assert paced_s == pytest.approx(record.token_times[-1] - record.first_answer_s, abs=1e-4)
                assert (record.ttft_met, record.tpot_met, record.attained) == (due == 60, True, due == 60)
