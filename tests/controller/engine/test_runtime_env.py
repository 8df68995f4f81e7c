"""Which runtime environments a template may have, and what is told of others."""

import math

import pytest

from controller.engine.runtime_env import DEEPEST, KEYS, LARGEST, LONGEST, problems

GOOD = [
    {},
    {"env_vars": {"PIP_INDEX_URL": "https://pypi.example/simple", "HF_TOKEN": "${HF_TOKEN}", "A": ""}},
    {"pip": ["vllm==0.32.0", "git+ssh://git@git.example/x.git", "--extra-index-url=https://me:${PYPI}@pypi.example"]},
    {"pip": {"packages": ["vllm"], "pip_check": False, "pip_version": "==24.0", "pip_install_options": ["--no-index"]}},
    {"uv": {"packages": ["vllm"], "uv_check": True, "uv_version": "==0.9", "uv_pip_install_options": ["--offline"]}},
    {"conda": "serving-1.2"},
    {"conda": {"dependencies": ["python=3.11", {"pip": ["vllm"]}]}},
    {"working_dir": "s3://bucket/engine.zip", "py_modules": ["https://a.example/b.whl", "local:///opt/b"]},
    {"working_dir": "local:///opt/engine"},
    {"config": {"setup_timeout_seconds": 1800, "eager_install": True}},
]


@pytest.mark.parametrize("value", GOOD)
def test_what_installs_an_engine_is_allowed(value):
    assert problems(value) == {}


def test_each_key_is_allowed_in_some_form():
    assert {key for value in GOOD for key in value} == set(KEYS)


@pytest.mark.parametrize(
    ("value", "field", "told"),
    [
        (["vllm"], "", "Must be an object"),
        ({"image_uri": "docker.io/vllm"}, ".image_uri", "Unknown; valid: conda, config, env_vars, pip"),
        ({"container": {"image": "x"}}, ".container", "Unknown"),
        ({"py_executable": "sh"}, ".py_executable", "Unknown"),
        ({"worker_process_setup_hook": "x.y"}, ".worker_process_setup_hook", "Unknown"),
        ({"env_vars": ["A"]}, ".env_vars", "Must be an object"),
        ({"env_vars": {"A-B": "1"}}, ".env_vars.A-B", "Names of variables"),
        ({"env_vars": {"A": 1}}, ".env_vars.A", "Must be a text"),
        ({"env_vars": {"HF_TOKEN": "hf_abc"}}, ".env_vars.HF_TOKEN", "Looks like a secret"),
        ({"env_vars": {"HF_TOKEN": {"secret": "hf"}}}, ".env_vars.HF_TOKEN", "Must be a text"),
        ({"env_vars": {"FLEET_TOKEN": "${X}"}}, ".env_vars.FLEET_TOKEN", "Slackline sets this variable"),
        ({"env_vars": {"LD_PRELOAD": "/x.so"}}, ".env_vars.LD_PRELOAD", "Slackline sets this variable"),
        ({"env_vars": {"SLACKLINE_ORDER": "x"}}, ".env_vars.SLACKLINE_ORDER", "Slackline sets this variable"),
        ({"env_vars": {"INDEX": "https://me:pw@pypi.example"}}, ".env_vars", "A URL must not have a password"),
        ({"pip": "requirements.txt"}, ".pip", "Must be a list of requirements"),
        ({"pip": []}, ".pip.packages", "Must have a requirement"),
        ({"pip": ["vllm\n--pre"]}, ".pip.packages", "texts of one line"),
        ({"pip": [1]}, ".pip.packages", "texts of one line"),
        ({"pip": {"pip_check": True}}, ".pip", "an object with packages"),
        ({"pip": {"packages": ["x"], "pip_check": 1}}, ".pip.pip_check", "Must be true or false"),
        ({"pip": {"packages": ["x"], "uv_check": True}}, ".pip.uv_check", "Unknown; valid: packages"),
        ({"pip": ["https://token@pypi.example/x.whl"]}, ".pip", "A URL must not have a password"),
        ({"pip": ["git+https://me:pw@git.example/x"]}, ".pip", "A URL must not have a password"),
        ({"uv": {"packages": "x"}}, ".uv.packages", "Must be a list"),
        ({"pip": ["x"], "uv": ["x"]}, ".uv", "Only one of conda, pip, uv"),
        ({"conda": "environment.yml"}, ".conda", "Must be the name of an environment"),
        ({"conda": "/opt/env"}, ".conda", "Must be the name of an environment"),
        ({"conda": {"dependencies": [{"pip": ["https://t@h.example/x"]}]}}, ".conda", "A URL must not have"),
        ({"working_dir": "."}, ".working_dir", "Slackline uploads no folders"),
        ({"working_dir": "https://a.example/b.tar"}, ".working_dir", "to a .zip"),
        ({"working_dir": "https://a.example/b.zip?signature=x"}, ".working_dir", "without a query"),
        ({"working_dir": "https://me:pw@a.example/b.zip"}, ".working_dir", "A URL must not have"),
        ({"py_modules": "s3://a/b.zip"}, ".py_modules", "Must be a list of URIs"),
        ({"py_modules": []}, ".py_modules", "Must be a list of URIs"),
        ({"config": {"log_files": []}}, ".config.log_files", "Unknown"),
        ({"config": {"setup_timeout_seconds": True}}, ".config.setup_timeout_seconds", "whole number of seconds"),
        ({"config": {"setup_timeout_seconds": 0}}, ".config.setup_timeout_seconds", "whole number of seconds"),
        ({"config": {"eager_install": "no"}}, ".config.eager_install", "true or false"),
        ({"config": 3}, ".config", "Must be an object"),
        ({"env_vars": {"A": math.nan}}, "", "Must be JSON"),
        ({"env_vars": {"A": "x" * (LONGEST + 1)}}, "", "at most 4,096 characters"),
        ({"env_vars": {"A": "\0"}}, "", "no NUL"),
        ({"env_vars": {"A": "\ud800"}}, "", "no NUL or unpaired surrogate"),
        ({"pip": ["x" * 4000] * 5}, "", f"at most {LARGEST:,} characters"),
    ],
)
def test_others_are_told_with_their_field(value, field, told):
    found = problems(value)
    assert list(found) == [f"runtime_env{field}"]
    assert told in found[f"runtime_env{field}"]
    assert "pw" not in str(found.values())
    assert "hf_abc" not in str(found)


def test_what_is_nested_too_deeply_is_not_followed():
    value: dict = {}
    for _ in range(100_000):
        value = {"conda": value}
    assert problems(value) == {"runtime_env": f"Must have at most {DEEPEST} levels."}
    while value:
        value = value.pop("conda")
