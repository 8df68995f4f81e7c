"""A registry maps names to implementations. Built-in policies register in the same way as additional ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from controller.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations by name. `kind` says what they are ("ordering") and appears in the error message."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise UnknownName(f"{self.kind} {name!r} is registered twice", field=self.kind)
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownName(
                f"unknown {self.kind} {name!r}; valid: {', '.join(sorted(self._entries))}", field=self.kind
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
