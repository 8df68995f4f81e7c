"""`python -m workers.engine --executor torch` as a client sees it, and what it does with a model it cannot serve."""

import asyncio
import json
import shutil
import subprocess
import sys

import aiohttp
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM

from tests.workers.engine.process import EngineProcess
from tests.workers.engine.torch.bench import VOCABULARY, folder
from workers.engine.text.model_tokenizer import FileTokenizer

pytestmark = [pytest.mark.torch, pytest.mark.long(60)]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
OPTIONS = ("--executor", "torch", "--kv-cache-gib", "0.02", "--block-size", "4", "--threads", "1")
PROMPTS = ["Once upon a time", "The engine", "a", "Numbers: 1 2 3 4 5 6 7 8 9 and so on and on and on " * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with a tokenizer and a chat template of its own."""
    path = shutil.copytree(folder(), tmp_path_factory.mktemp("served") / "tiny")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(PROMPTS * 3, vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module", params=["continuous", "preemptive"])
def engine(request, model):
    with EngineProcess("--model", str(model), "--scheduler", request.param, *OPTIONS) as process:
        yield process


async def ask(engine, path="/v1/completions", **body):
    async with aiohttp.ClientSession(engine.url) as http, http.post(path, json={"model": "tiny", **body}) as answer:
        return answer.status, await answer.json()


@torch.inference_mode()
def expected(model, ids, tokens):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    whole = torch.tensor([ids])
    out = reference.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return out[0, len(ids) :].tolist()


async def test_clients_read_the_text_that_the_library_generates(engine, model):
    tokenizer = FileTokenizer(model, VOCABULARY)
    asked = {"max_tokens": 10, "temperature": 0, "target_ttft": 2.0, "target_tbt": 1.0}
    answers = await asyncio.gather(*(ask(engine, prompt=prompt, **asked) for prompt in PROMPTS * 2))
    for prompt, (status, body) in zip(PROMPTS * 2, answers, strict=True):
        ids = tokenizer.encode(prompt)
        assert status == 200
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert body["choices"][0]["text"] == tokenizer.decode(expected(model, ids, 10))


async def test_chat_goes_through_the_models_template(engine, model):
    messages = [{"role": "user", "content": "a time"}]
    _, chat = await ask(engine, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    ids = FileTokenizer(model, VOCABULARY).encode("<s>user: a time</s><s>")
    assert ids.count(0) == 2  # the special token, not its letters
    _, plain = await ask(engine, prompt=ids, max_tokens=8, temperature=0)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(ids)


async def test_a_seed_repeats_a_text_and_another_changes_it(engine):
    asked = {"prompt": "The engine", "max_tokens": 12, "temperature": 1.0, "top_k": 50}
    texts = [(await ask(engine, **asked, seed=seed))[1]["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


async def test_what_the_engine_is(engine):
    async with aiohttp.ClientSession(engine.url) as http, http.get("/server_info") as answer:
        info = await answer.json()
    assert info["executor"] == "torch"
    assert info["tokenizer"] == "tokenizer.json"
    assert info["engine"]["max_model_len"] == 512
    if info["preemption"] is not None:
        assert info["preemption"]["boundary"] == "operator"
        assert info["preemption"]["rounds"]["submits"] > 0
        assert info["profile"]["id"] == "measured"
        assert info["preemption"]["decode_a"] == info["profile"]["latency"]["decode_a"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt": "a", "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": [VOCABULARY]}, "prompt"),
        ({"prompt": "a", "target_ttft": -1}, "target_ttft"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": [1] * 600}, "prompt"),
    ],
)
async def test_what_it_cannot_do_is_refused_with_the_field(engine, body, param):
    status, answer = await ask(engine, **body)
    assert (status, answer["error"]["param"]) == (400, param)


def refused(path, *options):
    """Standard error of an engine that must end by itself without ever listening."""
    command = [sys.executable, "-m", "workers.engine", "--port", "0", "--model", str(path), *OPTIONS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "listening" not in done.stderr
    return done.stderr


def test_nothing_is_served_from_a_truncated_file(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert f"{weights} is not a complete safetensors file" in refused(path)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("architectures", ["BertModel"], "architectures: BertModel is not among"),
        ("hidden_size", "wide", "hidden_size: expected an integer from 1 to 16777216, got 'wide'"),
        ("hidden_act", "gelu", "hidden_act: only silu is supported"),
        ("num_key_value_heads", 3, "num_key_value_heads: 3 does not divide"),
        ("rope_scaling", {"type": "yarn"}, "rope_type 'yarn' is not supported"),
        ("sliding_window", 128, "sliding_window: attention windows"),
        ("quantization_config", {"bits": 4}, "quantised weights"),
        ("num_hidden_layers", 3, "tensor model.layers.2.input_layernorm.weight is missing"),
        ("intermediate_size", 200, "has shape [224, 64], the model needs [200, 64]"),
        ("vocab_size", 100, "tokens, the model 100"),
    ],
)
def test_a_config_that_does_not_fit_is_named(model, tmp_path, key, value, complaint):
    path = shutil.copytree(model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    assert complaint in refused(path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--device", "cuda"), "no CUDA device is available"),
        (("--max-model-len", "9999"), "beyond the model's 512 positions"),
        (("--threads", "0"), "--threads: must be at least 1"),
        (("--boundary", "layer"), "--boundary: requires --scheduler preemptive"),
        (("--scheduler", "preemptive", "--batching", "vllm_v1"), "--batching: the preemptive scheduler batches by"),
        (("--scheduler", "preemptive", "--boundary", "chunk"), "--chunk-tokens: boundary chunk needs chunk_tokens"),
    ],
)
def test_options_that_do_not_fit_are_named(model, options, complaint):
    if options == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is one")
    assert complaint in refused(model, *options)


def test_on_a_cpu_nothing_waits_for_the_compiler_of_pytorch():
    """Its import takes as long as that of all the rest, at each start of an engine and of a rank."""
    imported = "from workers.engine.torch import executor, follower, serving"
    script = f"import sys; {imported}; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
