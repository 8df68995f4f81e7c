"""Serializer fields that several resources share: bounded numbers, names, JSON that PostgreSQL can store, versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controller.models.base import Versioned

SECONDS_MAX = 86_400.0
JSON_DEPTH_MAX = 6
JSON_VALUES_MAX = 500
NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")


class NameField(serializers.CharField):
    """A name that goes into URLs, metrics and headers: no spaces, no control characters."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", 100)
        super().__init__(**kwargs)
        message = "Must contain only letters, digits and . _ : / - and start with a letter or digit."
        self.validators.append(RegexValidator(NAME, message))


def checked_name(name: str, field: str, *, max_length: int) -> str:
    """A name out of an address. Raises ValidationError of this field."""
    try:
        checked: str = NameField(max_length=max_length, trim_whitespace=False).run_validation(name)
    except serializers.ValidationError as error:
        raise serializers.ValidationError({field: error.detail}) from error
    return checked


class BaseUrlField(serializers.CharField):
    """The URL of an engine: http or https, a host (also a name without a domain), an optional port and path."""

    def to_internal_value(self, data: Any) -> str:
        value = super().to_internal_value(data)
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80) > 0
        except ValueError:
            usable = False
        if not usable or value != value.strip() or any(letter.isspace() for letter in value):
            raise serializers.ValidationError("Must be an http:// or https:// URL with a host and an optional port.")
        return value


class NumberField(serializers.FloatField):
    """A finite number. NaN would pass every bound, here and in PostgreSQL; `true` is not accepted as 1."""

    def to_internal_value(self, data: Any) -> float:
        value = math.inf if isinstance(data, bool) else super().to_internal_value(data)
        if not math.isfinite(value):
            self.fail("invalid")
        return value


class SecondsSerializerField(NumberField):
    """A positive duration of at most a day, in seconds."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("min_value", 0.000_001)
        kwargs.setdefault("max_value", SECONDS_MAX)
        super().__init__(**kwargs)


class VersionField(serializers.IntegerField):
    """The version that a change is based on. If-Match may be sent instead."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("min_value", 0)
        kwargs.setdefault("max_value", 2**31 - 1)
        kwargs.setdefault("required", False)
        kwargs.setdefault("help_text", "Version on which the change is based; `If-Match` may be sent instead.")
        super().__init__(**kwargs)


def etag_of(version: int) -> str:
    """The ETag of an object: its version in quotes."""
    return f'"{version}"'


class VersionedOutput(serializers.ModelSerializer):
    """An object with its ETag, in lists as well."""

    etag = serializers.SerializerMethodField(help_text="For If-Match.")

    def get_field_names(self, declared_fields: Mapping[str, Any], info: Any) -> list[str]:
        return [*super().get_field_names(declared_fields, info), "etag"]

    def get_etag(self, row: Versioned) -> str:
        return etag_of(row.version)


@extend_schema_field({"type": "object", "additionalProperties": True})
class JsonObjectField(serializers.DictField):
    """A small JSON object. Values that PostgreSQL's jsonb cannot store (NUL, unpaired surrogates) are refused."""

    depth_max = JSON_DEPTH_MAX
    values_max = JSON_VALUES_MAX

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        value: dict[str, Any] = super().to_internal_value(data)
        for count, text in enumerate(_texts(value, self.depth_max)):
            if count > self.values_max:
                raise serializers.ValidationError(f"Must have at most {self.values_max} values.")
            if not _storable(text):
                raise serializers.ValidationError("Must not contain NUL characters or unpaired surrogates.")
        return value


@extend_schema_field({"type": "object", "additionalProperties": {"type": "string"}})
class LabelsField(JsonObjectField):
    """Short texts by name."""

    child = serializers.CharField(max_length=200, allow_blank=True)


def name_choices(field: serializers.Field) -> None:
    """Make the errors of all choice fields in this field list the valid choices."""
    if isinstance(field, serializers.ChoiceField):
        valid = ", ".join(str(each) for each in field.choices if each != "").replace("{", "{{").replace("}", "}}")
        field.error_messages["invalid_choice"] = f'"{{input}}" is not a valid choice. Must be one of: {valid}.'
    inner = field.fields.values() if isinstance(field, serializers.Serializer) else [getattr(field, "child", None)]
    for each in inner:
        if each is not None:
            name_choices(each)


def _texts(value: Any, depth: int) -> Iterable[str]:
    """Every key and value as text. Raises ValidationError if it is nested more than `depth` levels deep."""
    if depth < 0:
        raise serializers.ValidationError("Nested too deeply.")
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, depth - 1)
    else:
        yield str(value)


def _storable(text: str) -> bool:
    return "\x00" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
