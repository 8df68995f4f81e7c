"""The form of launch templates. A command is entered one argument a line, an environment one variable a line.

A text with line breaks is entered as JSON writes it, in double quotes, so that every stored template can be edited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from django import forms

from console.forms.base import EditForm, PositiveSecondsField
from controller.engine import placement
from controller.engine.launch_template import FIELDS, problems
from controller.engine.runtime_env import RUNTIME_ENV
from controller.models.base import NAME
from controller.models.fleet import KvRole, Role
from controller.services.fleet.launch_templates import BACKENDS, placement_problems
from controller.wording.values import BACKEND_NAMES

SECRET_BEGINS, SECRET_ENDS = "${secret:", "}"
TYPED_MAX = 100_000  # characters


def lines_of(text: str) -> list[str]:
    """Without the empty lines at the end, which nobody means."""
    return text.replace("\r\n", "\n").rstrip("\n").split("\n")


def one_line(text: str) -> str:
    """The text as it is entered: in quotes if a line could not hold it, or would be read as another one."""
    quoted = not text or text.startswith('"') or len(text.splitlines()) > 1 or text.endswith(("\n", "\r"))
    return json.dumps(text, ensure_ascii=False) if quoted else text


def text_of(line: str, number: int) -> str:
    """The inverse of `one_line`. Raises ValidationError with the line's number."""
    if not line.startswith('"'):
        return line
    try:
        text = json.loads(line)
    except ValueError:
        raise forms.ValidationError(
            f'Line {number}: a text in double quotes must be written as in JSON, such as "two\\nlines".'
        ) from None
    return str(text)


class LinesField(forms.CharField):
    """A textarea whose spaces count. What the service takes is read from its lines."""

    def __init__(self, rows: int, **kwargs: Any) -> None:
        attrs = {"rows": rows, "class": "mono", "spellcheck": "false", "autocomplete": "off"}
        super().__init__(strip=False, max_length=TYPED_MAX, widget=forms.Textarea(attrs=attrs), **kwargs)


class CommandField(LinesField):
    """A list of arguments."""

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(one_line(each) for each in value) if isinstance(value, list) else value

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value) or ""
        lines = lines_of(text) if text.strip() else []
        return [text_of(line, number) for number, line in enumerate(lines, start=1)]


class NamedLinesField(LinesField):
    """A NAME=value on each line. `shown` and `read`: how a value is written, and its inverse."""

    def shown(self, value: Any) -> str:
        raise NotImplementedError

    def read(self, entered: str, number: int) -> Any:
        raise NotImplementedError

    def prepare_value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return "\n".join(f"{name}={self.shown(each)}" for name, each in value.items())

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value) or ""
        found: dict[str, Any] = {}
        for number, line in enumerate(lines_of(text) if text.strip() else [], start=1):
            name, equals, entered = line.partition("=")
            if not line.strip():
                continue
            if not equals:
                raise forms.ValidationError(f"Line {number}: enter NAME=value.")
            if name in found:
                raise forms.ValidationError(f"Line {number}: {name} is entered twice.")
            found[name] = self.read(entered, number)
        return found

    def run_validators(self, value: Any) -> None:
        """Those of text do not fit; the form checks what was read."""

    def validate(self, value: Any) -> None:
        """No line is needed."""


class EnvironmentField(NamedLinesField):
    """Text, or `{"secret": NAME}`, by variable."""

    def shown(self, value: Any) -> str:
        return _shown(value)

    def read(self, entered: str, number: int) -> Any:
        return _read(entered, number)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{SECRET_BEGINS}{value['secret']}{SECRET_ENDS}"
    return one_line(str(value)) if value else ""


def _read(entered: str, number: int) -> Any:
    if entered.startswith(SECRET_BEGINS) and entered.endswith(SECRET_ENDS):
        return {"secret": entered[len(SECRET_BEGINS) : -len(SECRET_ENDS)]}
    return text_of(entered, number) if entered else ""


class FactsField(NamedLinesField):
    """The `spec` of a template: texts, and objects as JSON writes them."""

    def shown(self, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def read(self, entered: str, number: int) -> Any:
        entered = entered.strip()
        if not entered.startswith(("{", "[")):
            return entered
        told = f'Line {number}: must be written as in JSON, such as {{"GPU": 1}}.'
        try:
            value = json.loads(entered, parse_constant=_no_number)
            stored = json.dumps(value, ensure_ascii=False).encode()  # fails for unpaired surrogates
        except (ValueError, RecursionError):
            raise forms.ValidationError(told) from None
        if b"\\u0000" in stored:
            raise forms.ValidationError(f"Line {number}: must have no NUL.")
        return value


def _no_number(text: str) -> None:
    raise ValueError(text)


class LaunchTemplateForm(EditForm):
    """A launch template. Its name cannot change once it exists: instances and the audit refer to it."""

    name = forms.CharField(max_length=120, validators=[NAME], help_text="Cannot be changed later.")
    backend = forms.ChoiceField(
        choices=[(name, BACKEND_NAMES[name]) for name in BACKENDS], help_text="The kind of engine that it starts."
    )
    roles = forms.MultipleChoiceField(
        choices=Role.choices,
        widget=forms.CheckboxSelectMultiple,
        initial=[Role.COLLOCATED.value],
        help_text="Roles of the instances that it can start.",
    )
    command = CommandField(
        12,
        help_text="One argument per line, the program first; one with line breaks in double quotes, as in JSON. "
        "No shell reads them. Fields: "
        f"{', '.join(f'${{{name}}}' for name in FIELDS)}. Write $$ for a dollar sign.",
    )
    environment = EnvironmentField(
        5,
        required=False,
        help_text="One NAME=value per line, with the same fields. For a secret enter NAME=${secret:FILE}: "
        "the file of that name in ENGINE_SECRETS_DIR is read when an engine starts.",
    )
    spec = FactsField(
        4,
        label="Spec",
        required=False,
        help_text="One NAME=value per line. kv_role of vLLM engines that send or receive KV: "
        f"{', '.join(KvRole.values)}. On a Ray cluster: {', '.join(placement.FIELDS)}, {RUNTIME_ENV}; "
        'all but cluster as JSON, such as resources={"GPU": 1}.',
    )
    health_path = forms.CharField(
        label="Health path", max_length=255, initial="/health", help_text="Answers 200 once the engine is ready."
    )
    key_variable = forms.CharField(
        label="Key variable",
        max_length=128,
        required=False,
        help_text="Environment variable in which the engine takes its API key. Slackline makes a key for each "
        "instance. Leave empty if the engine asks for none.",
    )
    start_limit_s = PositiveSecondsField(
        label="Start limit",
        initial=600.0,
        help_text="An engine that is not ready this long after its process started is stopped and replaced.",
    )

    FIXED = ("name",)
    CHANGEABLE = (
        *("backend", "roles", "command", "environment", "spec", "health_path", "key_variable", "start_limit_s"),
    )

    def clean(self) -> dict[str, Any]:
        """Errors of one argument or variable name its line."""
        whole = super().clean() or {}
        if {"command", "environment", "health_path"} <= whole.keys():
            found = problems(
                whole["command"], whole["environment"], whole["health_path"], whole.get("key_variable", "")
            )
            for place, text in found.items():
                field, _, part = place.partition(".")
                self.add_error(field, f"{_where(field, part)}{text}")
        for place, text in placement_problems(whole.get("spec", {})).items():
            self.add_error("spec", f"{place}: {text}")
        return whole


def _where(field: str, part: str) -> str:
    if not part:
        return ""
    return f"Line {int(part) + 1}: " if field == "command" else f"{part}: "


def environment_lines(environment: Mapping[str, Any]) -> Sequence[str]:
    """As the form shows them."""
    return [f"{name}={_shown(value)}" for name, value in environment.items()]
