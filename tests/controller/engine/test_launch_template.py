"""Launch templates: what is refused when one is saved, and what becomes of its fields."""

import pytest

from controller.core.errors import ConfigError
from controller.engine.launch_template import LaunchTemplate, filled, final, problems, rendered
from controller.engine.shipped_templates import SHIPPED

GOOD = ["vllm", "serve", "${model}", "--port", "${port}"]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_valid(name):
    row = SHIPPED[name]
    assert (
        problems(row["command"], row["environment"], row.get("health_path", "/health"), row.get("key_variable")) == {}
    )


@pytest.mark.parametrize(
    ("command", "environment", "health", "place", "said"),
    [
        ([], {}, "/health", "command", "1 to 200 arguments"),
        ("vllm serve", {}, "/health", "command", "1 to 200 arguments"),
        (["", "${port}"], {}, "/health", "command.0", "must be written out"),
        (["${model}", "${port}"], {}, "/health", "command.0", "must be written out"),
        (["x", "${pork}"], {}, "/health", "command.1", "Unknown field ${pork}; valid: id, python, model"),
        (["x", "5 $", "${port}"], {}, "/health", "command.1", "write $$"),
        (["x", "a\0b", "${port}"], {}, "/health", "command.1", "text"),
        (["x", 7, "${port}"], {}, "/health", "command.1", "text"),
        (["x", "y"], {}, "/health", "command", "Must contain ${port}"),
        (["x", "--api-key", "${port}"], {}, "/health", "command.1", "visible to everyone"),
        (["x", "--hf-token=abc", "${port}"], {}, "/health", "command.1", "visible to everyone"),
        (GOOD, {"HF_TOKEN": "hf_abc"}, "/health", "environment.HF_TOKEN", '{"secret": '),
        (GOOD, {"OPENAI_API_KEY": "sk-1"}, "/health", "environment.OPENAI_API_KEY", '{"secret": '),
        (GOOD, {"X": {"secret": "../key"}}, "/health", "environment.X", "by its name"),
        (GOOD, {"X": {"secret": "a", "value": "b"}}, "/health", "environment.X", "by its name"),
        (GOOD, {"A B": "c"}, "/health", "environment.A B", "letters, digits"),
        (GOOD, {"CUDA_VISIBLE_DEVICES": "0"}, "/health", "environment.CUDA_VISIBLE_DEVICES", "sets this variable"),
        (GOOD, {"LD_PRELOAD": "/x.so"}, "/health", "environment.LD_PRELOAD", "sets this variable"),
        (GOOD, {"X": "${pork}"}, "/health", "environment.X", "Unknown field"),
        (["env", "HF_TOKEN=hf_abc", *GOOD], {}, "/health", "command.1", "visible to everyone"),
        (
            ["bash", "-c", "cd /x; HF_TOKEN=hf_abc vllm --port ${port}"],
            {},
            "/health",
            "command.2",
            "visible to everyone",
        ),
        (["x", "-token", "${port}"], {}, "/health", "command.1", "visible to everyone"),
        ([*GOOD, "--cache=s3://key:hunter2@bucket/x"], {}, "/health", "command.5", "password or token"),
        (
            GOOD,
            {"HTTPS_PROXY": "http://me:hunter2@proxy:3128"},
            "/health",
            "environment.HTTPS_PROXY",
            "password or token",
        ),
        (GOOD, {"INDEX": "https://ghp_abc@github.com/x"}, "/health", "environment.INDEX", "password or token"),
        (GOOD, {}, "health", "health_path", "such as /health"),
        (GOOD, {}, "/health?a=b c", "health_path", "such as /health"),
    ],
)
def test_what_is_refused_says_where_and_why(command, environment, health, place, said):
    found = problems(command, environment, health)
    assert set(found) == {place}
    assert said in found[place]


@pytest.mark.parametrize("name", ["--max-num-batched-tokens", "--tokenizer", "--port"])
def test_options_that_only_look_like_secrets_are_taken(name):
    assert problems(["x", name, "${port}"], {"MAX_TOKENS": "5", "TOKENIZERS_PARALLELISM": "false"}, "/") == {}


@pytest.mark.parametrize(
    "text",
    [
        "git+ssh://git@github.com/x",
        "http://proxy:3128/a@b",
        "pip install -i https://me:$${INDEX_TOKEN}@pypi.example/simple",
        "HF_TOKEN=$$OTHER exec vllm",
        'HF_TOKEN="$$OTHER" exec vllm',
        '--kv-transfer-config={"kv_connector": "NixlConnector"}',
    ],
)
def test_texts_that_only_look_as_if_they_had_a_secret_are_taken(text):
    assert problems([*GOOD, text], {}, "/") == {}


@pytest.mark.parametrize(
    ("name", "environment", "said"),
    [
        ("A-B", {}, "name of an environment variable"),
        (7, {}, "name of an environment variable"),
        ("CUDA_VISIBLE_DEVICES", {}, "sets this variable itself"),
        ("LD_PRELOAD", {}, "sets this variable itself"),
        ("PATH", {}, "sets this variable itself"),
        ("VLLM_API_KEY", {"VLLM_API_KEY": {"secret": "mine"}}, "environment sets this variable too"),
    ],
)
def test_a_key_variable_that_would_hide_another_value_is_refused(name, environment, said):
    found = problems(GOOD, environment, "/health", name)
    assert set(found) == {"key_variable"}
    assert said in found["key_variable"]


def test_the_port_may_be_told_by_the_environment():
    assert problems(["x"], {"PORT": "${port}"}, "/health") == {}


def test_fields_are_filled_in_once_and_dollars_stay():
    made = rendered(
        LaunchTemplate(("x", "${model}", "$$HOME", "${port}"), {"A": "$$${id}"}), {"model": "$m", "id": "v"}
    )
    done = final(made, "h", 5, "/python")
    assert done.command == ("x", "$m", "$HOME", "5")
    assert done.environment == {"A": "$v"}


def test_a_text_that_is_no_template_says_what_it_is():
    with pytest.raises(ConfigError, match=r"write \$\$"):
        filled("$", {})
