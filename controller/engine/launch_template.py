"""Launch templates: how an engine of some kind is started, with named fields in place of what differs between
instances.

A template is a command (a list of arguments, no shell), an environment, a health path and a time limit. `${name}` in an
argument or a value stands for a field of FIELDS, `$$` for a dollar sign. A secret is named and never written into a
template: whoever starts the engine reads it from its own machine, and only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template as Text
from types import MappingProxyType
from typing import Any

from controller.core.errors import ConfigError

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "id": "id of the instance",
        "python": "the Python that Slackline itself runs in",
        "model": "what the engine loads: the folder in the instance's spec, else the model's name",
        "served_name": "name under which clients ask for the model",
        "host": "address to listen at",
        "port": "port to listen at, chosen at the start",
        "context": "context length of the model, in tokens",
        "slots": "maximum running requests",
        "role": "collocated, prefill or decode",
        "tp": "tensor parallelism",
        "device": "indexes of the devices that the instance holds, separated by commas",
    }
)
AT_START = ("host", "port", "python")  # known to whoever starts the process, and to nobody before
ARGUMENTS_MAX, VARIABLES_MAX, LENGTH_MAX = 200, 100, 4096
LONGEST_START_S = 86_400.0
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # name of a file
_USER = re.compile(r"://([^/\s@]+)@")
_FILLED_IN = re.compile(r"\$\{\w+\}|\$\$(\w+|\{\w+\})")  # a field, or a variable of a shell that the command runs
_ASSIGNED = re.compile(r"(?:^|[\s;&|])([A-Z_][A-Z0-9_]*)=(?!\$|[\"']\$|\s|$)")  # NAME=value for `env` or a shell
RESERVED = re.compile(r"CUDA_VISIBLE_DEVICES|FLEET_TOKEN.*|SECRET_KEY.*|DATABASE_URL.*|REDIS_URL.*|SLACKLINE_.*|LD_.*")
SOUNDS_SECRET = re.compile(r"(?i)(^|.*[_-])(token|secret|password|passwd|api_?key|access_?key|private_?key)$")
NOT_STORED = re.compile("[\\0\\ud800-\\udfff]")  # by PostgreSQL, in JSON
HEALTH = re.compile(r"/[A-Za-z0-9._~/-]{0,200}")


@dataclass(frozen=True, slots=True)
class LaunchTemplate:
    """`environment`: text by variable. `secrets`: name of a secret by variable. `key_variable`: in which the engine
    takes the key that it then asks for; "": it asks for none. `start_limit_s`: from its start until it is healthy."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    start_limit_s: float = 600.0
    key_variable: str = ""


def problems(command: object, environment: object, health_path: object, key_variable: object = "") -> dict[str, str]:
    """What is wrong with a template's values, by field. Empty if nothing is."""
    found = _command_problems(command) | _environment_problems(environment)
    if not isinstance(health_path, str) or not HEALTH.fullmatch(health_path):
        found["health_path"] = "Must be a path such as /health."
    if wrong := _key_problem(key_variable, environment):
        found["key_variable"] = wrong
    if not found and "port" not in set(_named(command, environment)):
        found["command"] = "Must contain ${port}: Slackline chooses the port and looks for the engine there."
    return found


def split_environment(environment: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Plain values, and names of secrets, by variable."""
    plain = {name: value for name, value in environment.items() if isinstance(value, str)}
    return plain, {name: value["secret"] for name, value in environment.items() if isinstance(value, Mapping)}


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with these fields filled in; other fields stay as they are. Raises ConfigError for a text that is no
    template."""
    try:
        return Text(text).substitute({**{name: f"${{{name}}}" for name in FIELDS}, **values})
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{text!r}: {_reason(error)}", "command") from error


def rendered(template: LaunchTemplate, values: Mapping[str, str]) -> LaunchTemplate:
    """The template with these fields filled in. A `$$` stays until the last fields are filled in (`final`), and so do
    the dollars of values."""
    keep = {name: value.replace("$", "$$") for name, value in values.items()}

    def fill(text: str) -> str:
        return "$$".join(filled(part, keep) for part in text.split("$$"))

    return LaunchTemplate(
        tuple(fill(each) for each in template.command),
        {name: fill(value) for name, value in template.environment.items()},
        template.secrets,
        template.health_path,
        template.start_limit_s,
        template.key_variable,
    )


def final(template: LaunchTemplate, host: str, port: int, python: str) -> LaunchTemplate:
    """The template as it is run."""
    made = rendered(template, {"host": host, "port": str(port), "python": python})
    return LaunchTemplate(
        tuple(each.replace("$$", "$") for each in made.command),
        {name: value.replace("$$", "$") for name, value in made.environment.items()},
        made.secrets,
        made.health_path,
        made.start_limit_s,
        made.key_variable,
    )


def _command_problems(command: object) -> dict[str, str]:
    if not isinstance(command, Sequence) or isinstance(command, str) or not 1 <= len(command) <= ARGUMENTS_MAX:
        return {"command": f"Must be a list of 1 to {ARGUMENTS_MAX} arguments, the program first."}
    found = {}
    for place, text in enumerate(command):
        wrong = _text_problem(text)
        if not wrong and place == 0 and (not text.strip() or ("$" in text and text != "${python}")):
            wrong = "The program must be written out, or be ${python}."
        name = text.lstrip("-").split("=")[0].replace("-", "_") if isinstance(text, str) else ""
        assigned = _ASSIGNED.findall(text) if not wrong else []
        if not wrong and (
            (text.startswith("-") and SOUNDS_SECRET.match(name)) or any(map(SOUNDS_SECRET.match, assigned))
        ):
            wrong = "A secret on a command line is visible to everyone on the host. Use the environment."
        if wrong:
            found[f"command.{place}"] = wrong
    return found


def _key_problem(name: object, environment: object) -> str:
    if not name:
        return ""
    if not isinstance(name, str) or not VARIABLE.fullmatch(name):
        return "Must be the name of an environment variable."
    if RESERVED.fullmatch(name) or name == "PATH":
        return "Slackline sets this variable itself."
    if isinstance(environment, Mapping) and name in environment:
        return "The environment sets this variable too. The engine would get the key, and not that value."
    return ""


def _environment_problems(environment: object) -> dict[str, str]:
    if not isinstance(environment, Mapping) or len(environment) > VARIABLES_MAX:
        return {"environment": f"Must be an object of at most {VARIABLES_MAX} variables."}
    found = {}
    for name, value in environment.items():
        if wrong := _variable_problem(name, value):
            found[f"environment.{name}"] = wrong
    return found


def _variable_problem(name: object, value: object) -> str:
    if not isinstance(name, str) or not VARIABLE.fullmatch(name):
        return "Names of variables have letters, digits and _ and do not start with a digit."
    if RESERVED.fullmatch(name):
        return "Slackline sets this variable itself."
    if isinstance(value, Mapping):
        named = value.get("secret")
        fits = set(value) == {"secret"} and isinstance(named, str) and SECRET.fullmatch(named)
        return "" if fits else 'A secret is given by its name: {"secret": "name-of-the-file"}.'
    if SOUNDS_SECRET.match(name):
        return 'Looks like a secret. Give its name instead: {"secret": "name-of-the-file"}.'
    return _text_problem(value)


def _text_problem(text: object) -> str:
    if not isinstance(text, str) or len(text) > LENGTH_MAX or NOT_STORED.search(text):
        return f"Must be a text of at most {LENGTH_MAX} characters, without NUL and unpaired surrogates."
    try:
        Text(text).substitute(FIELDS)
    except (KeyError, ValueError) as error:
        return _reason(error)
    if shows_secret(text, _FILLED_IN):
        return 'A URL must not have a password or token in it. Name a secret in the environment: {"secret": "file"}.'
    return ""


def shows_secret(text: str, filled_in: re.Pattern[str]) -> bool:
    """Whether a URL in it has a password, or a user that may be a token. `git@` is neither, nor is what `filled_in`
    matches, since it stands for something else."""
    for user in _USER.findall(text):
        name, colon, password = user.partition(":")
        if not filled_in.fullmatch(password if colon else name) and user != "git":
            return True
    return False


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"Unknown field ${{{error.args[0]}}}; valid: {', '.join(FIELDS)}."
    return "A $ must begin a field such as ${port}; write $$ for a dollar sign."


def _named(command: object, environment: object) -> Iterator[str]:
    texts = [*command] if isinstance(command, Sequence) else []
    if isinstance(environment, Mapping):
        texts += [value for value in environment.values() if isinstance(value, str)]
    for text in texts:
        yield from Text(str(text)).get_identifiers()
