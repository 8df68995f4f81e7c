"""`utf8-chunk4`: a tokenizer without a vocabulary file. One token is up to four bytes of UTF-8.

A text is cut every four bytes; only its last token may be shorter. Ids of different lengths are disjoint, so every text
survives the round trip, and every id below VOCAB_SIZE decodes to a text. English text has one token for every four
characters. Each chat message starts at a token boundary, so a growing conversation keeps its earlier tokens and their
cached KV.
"""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

NAME = "utf8-chunk4"
CHUNK = 4
OFFSETS = (0, 0, 256, 256 + 256**2, 256 + 256**2 + 256**3)  # first id of each length, by length
EOS = OFFSETS[4] + 256**4
VOCAB_SIZE = EOS + 1


def encode(text: str) -> list[int]:
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) // CHUNK * CHUNK
    words = array("I", data[:whole])
    if sys.byteorder == "little":
        words.byteswap()
    base = OFFSETS[CHUNK]
    ids = [base + word for word in words]
    tail = data[whole:]
    if tail:
        ids.append(OFFSETS[len(tail)] + int.from_bytes(tail))
    return ids


def token_bytes(token: int) -> bytes:
    if token == EOS:
        return b""
    for length in range(CHUNK, 0, -1):
        if token >= OFFSETS[length]:
            return (token - OFFSETS[length]).to_bytes(length)
    raise ValueError(f"token id {token} is negative")


def decode(tokens: Iterable[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def estimate(text: str) -> int:
    """A lower bound on the tokens of `text`, without encoding it."""
    return -(-len(text) // CHUNK)


def encode_chat(messages: Sequence[tuple[str, str]]) -> list[int]:
    """The tokens of a conversation: `<role>` and content of each message, then the header of the answer."""
    ids: list[int] = []
    for role, content in messages:
        ids += encode(f"<{role}>")
        ids += encode(content)
    return ids + encode("<assistant>")


class Decoder:
    """Decodes token by token. A character that spans tokens appears with its last byte."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes] = token_bytes) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int, last: bool = False) -> str:
        return self._decoder.decode(self._bytes_of(token), last)

    def rest(self) -> str:
        return self._decoder.decode(b"", True)


class StreamDecoder(Protocol):
    def feed(self, token: int, last: bool = False) -> str: ...

    def rest(self) -> str:
        """The text that is still kept, when no token follows."""
        ...


class Tokenizer(Protocol):
    """The tokenizer interface of requests and streams. `estimate`: a lower bound on the tokens of a text, which needs
    no encoding."""

    name: str
    vocab_size: int

    def encode(self, text: str, special: bool = True) -> list[int]:
        """`special`: whether to add the tokens that the model expects around a text, such as one for its beginning."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def estimate(self, text: str) -> int: ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]: ...

    def decoder(self) -> StreamDecoder: ...


class ChunkTokenizer:
    """The functions of this module as a Tokenizer."""

    name = NAME
    vocab_size = VOCAB_SIZE
    decode = staticmethod(decode)
    estimate = staticmethod(estimate)
    encode_chat = staticmethod(encode_chat)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return encode(text)

    def decoder(self) -> Decoder:
        return Decoder()
