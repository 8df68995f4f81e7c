"""Prompt lengths by a model's own tokenizer, where its configuration names one (a Hugging Face `tokenizer.json`).

Needs the optional library `tokenizers` (requirements/tokenizers.txt). Files are read in a thread, once for each path
and modification time. Until a file is read, or if it cannot be, lengths are estimated from characters; the reason is in
the log, in /healthz and in /metrics. A file that could not be read is tried again with the next configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from controller.core.errors import SlacklineError
from controller.core.snapshot import ModelConfig

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
READY, LOADING = "ready", "loading"


class Unusable(SlacklineError):
    """A tokenizer that cannot be used; the message says why."""


class ModelTokenizer(Protocol):
    """Also called from threads."""

    def count(self, texts: Sequence[str], *, special: bool) -> int:
        """Tokens of all texts; `special`: with those the model puts around a text."""
        ...


Load = Callable[[str], ModelTokenizer]


class HuggingFace:
    """One `tokenizer.json`, or the folder that holds it. Raises Unusable."""

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise Unusable("the library is not installed: pip install -r requirements/tokenizers.txt") from None
        file = _file(path)
        if not file.is_file():
            raise Unusable(f"there is no file {file}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise Unusable(f"{file} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def count(self, texts: Sequence[str], *, special: bool) -> int:
        return sum(len(self._tokenizer.encode(text, add_special_tokens=special)) for text in texts)


class Tokenizers:
    """The tokenizers of one configuration. Everything except `count` runs on the loop."""

    def __init__(self, load: Load = HuggingFace) -> None:
        self._load = load
        self._wanted: dict[str, str] = {}  # path by model
        self._loaded: dict[str, tuple[float, ModelTokenizer]] = {}  # by path, with the file's modification time
        self._why_not: dict[str, str] = {}  # by path
        self._loading: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        """Whether any tokenizer can be used."""
        return bool(self._loaded)

    def configure(self, models: Iterable[ModelConfig]) -> None:
        """Level-triggered: read what is new or has changed, forget what is no longer configured."""
        self._wanted = {model.name: model.tokenizer for model in models if model.tokenizer}
        paths = set(self._wanted.values())
        for path in self._loaded.keys() - paths:
            del self._loaded[path]
        self._why_not = {path: why for path, why in self._why_not.items() if path in paths}
        for path in paths - self._loading:
            self._loading.add(path)
            task = asyncio.get_running_loop().create_task(self._read(path))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until every file is read or known to be unusable."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def count(self, model: ModelConfig, texts: Sequence[str], *, special: bool) -> int | None:
        """Tokens of all texts. None without a tokenizer, or if it fails on them."""
        loaded = self._loaded.get(model.tokenizer) if model.tokenizer else None
        if loaded is None:
            return None
        try:
            return loaded[1].count(texts, special=special)
        except Exception as error:  # the library raises nothing narrower; the estimate serves
            log.warning("the tokenizer of %s failed on a prompt: %s", model.name, error)
            return None

    def states(self) -> dict[str, str]:
        """By model: ready, loading, or why its tokenizer is not used."""
        return {model: self._state(path) for model, path in sorted(self._wanted.items())}

    def _state(self, path: str) -> str:
        if path in self._loaded:
            return READY
        return self._why_not.get(path, LOADING)

    async def _read(self, path: str) -> None:
        try:
            known = self._loaded.get(path)
            fresh = await asyncio.to_thread(self._changed, path, known[0] if known is not None else None)
            if fresh is not None and path in self._wanted.values():
                self._loaded[path] = fresh
                self._why_not.pop(path, None)
                log.info("prompts are counted by %s", path)
        except (Unusable, OSError) as error:
            self._loaded.pop(path, None)
            self._why_not[path] = str(error)
            log.warning("prompts are estimated: %s", error)
        finally:
            self._loading.discard(path)

    def _changed(self, path: str, known_at: float | None) -> tuple[float, ModelTokenizer] | None:
        """Runs in a thread. None if the file has not changed."""
        file = _file(path)
        at = file.stat().st_mtime if file.is_file() else 0.0
        return (at, self._load(path)) if at != known_at else None


def _file(path: str) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)
