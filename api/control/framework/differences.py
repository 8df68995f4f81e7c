"""The body of a 412: the stored object beside what the caller sent, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers
from rest_framework.response import Response


def as_sent(bound: serializers.Serializer) -> dict[str, Any]:
    """The validated values in the form of a response, so that "0.5" and 0.5 are the same number."""
    return {
        name: None if value is None else bound.fields[name].to_representation(value)
        for name, value in bound.validated_data.items()
        if name != "version"
    }


def add_stored(response: Response, stored: Mapping[str, Any] | None, sent: Mapping[str, Any]) -> None:
    """Add `current` and `differences` to an error, and the ETag that a second attempt needs. `stored` None: unknown."""
    differing = {name: value for name, value in sent.items() if stored is not None and stored.get(name) != value}
    error = response.data["error"]
    error["current"] = stored
    error["differences"] = [
        {"field": name, "stored": stored.get(name) if stored else None, "sent": value}
        for name, value in differing.items()
    ]
    if stored is not None and "etag" in stored:
        response["ETag"] = stored["etag"]
