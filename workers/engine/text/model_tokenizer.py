"""Tokenizers of real models: the one in the model's folder; without one, each byte is a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from workers.engine.errors import HttpError
from workers.engine.text.tokenizer import Decoder, Tokenizer

FILE = "tokenizer.json"
BYTES = 256
BROKEN = "Invalid prefix"  # the beginning of the library's error for text that changed while it was decoded


class ByteTokenizer:
    """The tokenizer of models without a tokenizer file. Ids from 256 on have no text and are shown as <id>."""

    name = "bytes"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < BYTES:
            raise ConfigError(f"without {FILE} a vocabulary of at least {BYTES} is required, not {vocab_size}", "model")
        self.vocab_size = vocab_size

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(_bytes_of, tokens)).decode("utf-8", "replace")

    def estimate(self, text: str) -> int:
        return len(text)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return self.encode("".join(f"<{role}>{content}" for role, content in messages) + "<assistant>")

    def decoder(self) -> Decoder:
        return Decoder(_bytes_of)


def _bytes_of(token: int) -> bytes:
    return bytes([token]) if token < BYTES else f"<{token}>".encode()


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library, with the chat template of tokenizer_config.json if any."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{folder / FILE}: {error}", "model") from error
        if self._tokenizer.get_vocab_size() > vocab_size:
            size = self._tokenizer.get_vocab_size()
            raise ConfigError(f"{folder / FILE} has {size} tokens, the model {vocab_size}", "model")
        self.name = FILE
        self.vocab_size = vocab_size
        self._settings = _settings(folder)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def estimate(self, text: str) -> int:
        """One, since a token may stand for any number of characters."""
        return 1 if text else 0

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        template = self._settings.get("chat_template")
        if not isinstance(template, str):
            raise HttpError("this model has no chat template; use /v1/completions", "messages")
        named = {key: _text(self._settings.get(key)) for key in ("bos_token", "eos_token")}
        turns = [{"role": role, "content": content} for role, content in messages]
        text = _render(template, messages=turns, add_generation_prompt=True, **named)
        return self.encode(text, special=False)  # the template adds special tokens itself

    def decoder(self) -> FileDecoder:
        return FileDecoder(self._tokenizer)


class FileDecoder:
    """Decodes token by token. An incomplete character is kept until it is complete, at most until the last token."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._new_stream = partial(DecodeStream, skip_special_tokens=True)
        self._stream = self._new_stream()
        self._held: list[int] = []

    def feed(self, token: int, last: bool = False) -> str:
        self._held.append(token)
        text = self._step(token)
        if text is not None:
            self._held.clear()
        elif last:
            text = self.rest()
        return text or ""

    def rest(self) -> str:
        text = str(self._tokenizer.decode(self._held, skip_special_tokens=True))
        self._held.clear()
        return text

    def _step(self, token: int) -> str | None:
        """The text that the token completes. Bytes that turn out to be no character change the text that the library
        has kept, which it reports as an error; then its stream is restarted."""
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library has no class of its own for it
            if not str(error).startswith(BROKEN):
                raise
            self._stream = self._new_stream()
            self._stream.step(self._tokenizer, token)  # so that the next token is decoded after this one
            return str(self._tokenizer.decode(self._held, skip_special_tokens=True))


def model_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    return FileTokenizer(folder, vocab_size) if (folder / FILE).is_file() else ByteTokenizer(vocab_size)


def _settings(folder: Path) -> dict[str, Any]:
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "model") from error
    if template.is_file():
        found["chat_template"] = template.read_text()
    return dict(found)


def _text(token: Any) -> str:
    """The text of a special token, which files contain as a string or as an object with `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _render(template: str, **values: Any) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template).render(**values)
    except TemplateError as error:
        raise HttpError(f"the model's chat template refuses these messages: {error}", "messages") from error


def _refuse(message: str) -> None:
    raise HttpError(message, "messages")
