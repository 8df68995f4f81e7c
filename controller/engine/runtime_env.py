"""The runtime environment of a job: what Ray sets up on the node before an engine's launcher runs there. It is part of
the `spec` of a launch template and goes to the Jobs API as it is.

Allowed is what installs the engine's program and files, or sets variables for that (decision 214). Whoever reads the
cluster's jobs reads it, so it has no secrets: `${NAME}` stands for a variable of the node, where Ray or pip fill it in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from controller.engine.launch_template import NOT_STORED, RESERVED, SOUNDS_SECRET, VARIABLE, VARIABLES_MAX, shows_secret

RUNTIME_ENV = "runtime_env"
LARGEST, LONGEST, DEEPEST, MOST = 16_384, 4096, 5, 200  # characters in all and of one text; levels; entries of a list
INSTALLERS = ("conda", "pip", "uv")
SHORTEST_SETUP_S, LONGEST_SETUP_S = 1, 86_400
_OPTIONS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "pip": {"packages": list, "pip_check": bool, "pip_version": str, "pip_install_options": list},
        "uv": {"packages": list, "uv_check": bool, "uv_version": str, "uv_pip_install_options": list},
    }
)
_CONDA = re.compile(r"(?!.*\.ya?ml$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PACKED = re.compile(r"(https|s3|gs|azure|abfss|file)://[^\s?#]+\.zip")
_WHEEL = re.compile(r"(https|s3|gs|azure|abfss|file)://[^\s?#]+\.(zip|whl)")
_FOLDER = re.compile(r"local:///[^\s?#]+")
_OF_NODE = re.compile(r"\$\{\w+\}")


def problems(value: object) -> dict[str, str]:
    """What is wrong with it, by path from `runtime_env` on. Empty if nothing is."""
    if not isinstance(value, Mapping):
        return {RUNTIME_ENV: 'Must be an object such as {"pip": ["vllm==0.32.0"]}.'}
    if wrong := _whole(value):
        return {RUNTIME_ENV: wrong}
    found: dict[str, str] = {}
    for name, each in value.items():
        if name not in _CHECKS:
            found[f"{RUNTIME_ENV}.{name}"] = f"Unknown; valid: {', '.join(_CHECKS)}."
            continue
        found |= {".".join(filter(None, (RUNTIME_ENV, name, part))): why for part, why in _CHECKS[name](each)}
        if any(shows_secret(text, _OF_NODE) for text in _texts(each)):
            found.setdefault(
                f"{RUNTIME_ENV}.{name}",
                "A URL must not have a password or token in it. Write ${NAME} for a variable of the node.",
            )
    if len(both := [name for name in INSTALLERS if name in value]) > 1:
        found.setdefault(f"{RUNTIME_ENV}.{both[-1]}", f"Only one of {', '.join(INSTALLERS)}.")
    return found


def _whole(value: Mapping[str, Any]) -> str:
    """What is wrong with its size and its values as JSON."""
    if _depth(value) > DEEPEST:
        return f"Must have at most {DEEPEST} levels."
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return "Must be JSON."
    if size > LARGEST:
        return f"Must have at most {LARGEST:,} characters as JSON."
    if any(NOT_STORED.search(text) or len(text) > LONGEST for text in _texts(value)):
        return f"Each text must have at most {LONGEST:,} characters, and no NUL or unpaired surrogate."
    return ""


def _variables(value: object) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping) or len(value) > VARIABLES_MAX:
        yield "", f"Must be an object of at most {VARIABLES_MAX} variables."
        return
    for name, text in value.items():
        if not VARIABLE.fullmatch(name):
            yield name, "Names of variables have letters, digits and _ and do not start with a digit."
        elif RESERVED.fullmatch(name):
            yield name, "Slackline sets this variable itself."
        elif not isinstance(text, str):
            yield name, "Must be a text."
        elif SOUNDS_SECRET.match(name) and not _OF_NODE.fullmatch(text):
            yield name, "Looks like a secret, and the cluster shows its jobs. Name it in the template's environment."


def _installer(name: str) -> Callable[[object], Iterator[tuple[str, str]]]:
    known = _OPTIONS[name]

    def check(value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, list):
            value = {"packages": value}
        if not isinstance(value, Mapping) or "packages" not in value:
            yield "", f"Must be a list of requirements, or an object with packages; beside it: {', '.join(known)}."
            return
        for key, each in value.items():
            if key not in known:
                yield key, f"Unknown; valid: {', '.join(known)}."
            elif not isinstance(each, known[key]):
                yield key, f"Must be {_NAMES[known[key]]}."
            elif isinstance(each, list) and not (len(each) <= MOST and all(map(_line, each))):
                yield key, f"Must be a list of at most {MOST} texts of one line."
        if value["packages"] == []:
            yield "packages", "Must have a requirement."

    return check


def _conda(value: object) -> Iterator[tuple[str, str]]:
    named = isinstance(value, str) and _CONDA.fullmatch(value)
    if not named and not (isinstance(value, Mapping) and value):
        yield "", "Must be the name of an environment of the nodes, or what an environment.yml has, as an object."


def _working_dir(value: object) -> Iterator[tuple[str, str]]:
    if not (isinstance(value, str) and (_PACKED.fullmatch(value) or _FOLDER.fullmatch(value))):
        yield "", f"Must be {_WHERE} to a .zip. Slackline uploads no folders."


def _modules(value: object) -> Iterator[tuple[str, str]]:
    listed = value if isinstance(value, list) else []
    fits = all(isinstance(each, str) and (_WHEEL.fullmatch(each) or _FOLDER.fullmatch(each)) for each in listed)
    if not (fits and 0 < len(listed) <= MOST):
        yield "", f"Must be a list of URIs, each {_WHERE} to a .zip or .whl."


def _config(value: object) -> Iterator[tuple[str, str]]:
    known = ("eager_install", "setup_timeout_seconds")
    if not isinstance(value, Mapping):
        yield "", f"Must be an object of: {', '.join(known)}."
        return
    for key, each in value.items():
        if key not in known:
            yield key, f"Unknown; valid: {', '.join(known)}."
        elif key == "eager_install" and not isinstance(each, bool):
            yield key, "Must be true or false."
        elif key == "setup_timeout_seconds" and not (type(each) is int and SHORTEST_SETUP_S <= each <= LONGEST_SETUP_S):
            yield key, f"Must be a whole number of seconds from {SHORTEST_SETUP_S} to {LONGEST_SETUP_S:,}."


_WHERE = "local:///FOLDER (of every node), or a URI without a query (https, s3, gs, azure, abfss, file)"
_NAMES = MappingProxyType({list: "a list", bool: "true or false", str: "a text"})
_CHECKS: Mapping[str, Callable[[Any], Iterator[tuple[str, str]]]] = MappingProxyType(
    {
        "conda": _conda,
        "config": _config,
        "env_vars": _variables,
        "pip": _installer("pip"),
        "py_modules": _modules,
        "uv": _installer("uv"),
        "working_dir": _working_dir,
    }
)
KEYS = tuple(_CHECKS)


def _line(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and len(value.splitlines()) == 1


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _depth(value: object) -> float:
    """Levels below it; more than DEEPEST are not counted."""
    level, levels = [value], 0
    while level and levels <= DEEPEST:
        level = [inner for each in level for inner in _inner(each)]
        levels += bool(level)
    return math.inf if level else levels


def _inner(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
