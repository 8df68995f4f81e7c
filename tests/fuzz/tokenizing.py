"""Targets of everything that counts prompts or turns tokens into text, by files and texts of others."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import tokenizers
import tokenizers.decoders
import tokenizers.models

from api.openai.tokenizers import HuggingFace, Tokenizers, Unusable
from controller.core.errors import ConfigError
from controller.core.snapshot import ModelConfig
from tests.fuzz.targets import LOOP, Found, target
from workers.engine.text.model_tokenizer import ByteTokenizer, FileTokenizer

VOCABULARY = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "\u2581one": 258}
MODEL_FOLDER = Path(tempfile.mkdtemp(prefix="slackline-fuzz-model-"))
atexit.register(shutil.rmtree, MODEL_FOLDER, ignore_errors=True)


def _tokenizer() -> bytes:
    """Bytes as tokens, as models have them for what no other token covers."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.add_special_tokens(["<s>"])
    made.save(str(MODEL_FOLDER / "tokenizer.json"))
    return (MODEL_FOLDER / "tokenizer.json").read_bytes()


WHOLE_TOKENIZER = _tokenizer()
FILE_TOKENIZER = FileTokenizer(MODEL_FOLDER, 300)
COUNTED = ModelConfig("tiny", (), 4096, 4.0, str(MODEL_FOLDER))
COUNTERS = Tokenizers()


async def _configure() -> None:
    COUNTERS.configure([COUNTED])
    await COUNTERS.settle()


LOOP.run_until_complete(_configure())


@target("a prompt that is counted", b"one two", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80\x00", "\u2581one<s>".encode())
def counted(data: bytes) -> None:
    """By the model's own tokenizer, in the gateway. A client may send lone surrogates as JSON escapes."""
    text = data.decode("utf-8", "surrogatepass") if _decodes(data) else data.decode("latin-1")
    for special in (False, True):
        count = COUNTERS.count(COUNTED, [text, ""], special=special)
        if count is not None and not 0 <= count <= 2 * len(data) + 4:
            raise Found(f"{len(data)} bytes are {count} tokens")
        if count is None and text.isprintable() and text.isascii():
            raise Found("a plain text was not counted")


def _decodes(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


@target("file of a tokenizer", WHOLE_TOKENIZER, WHOLE_TOKENIZER[:200], b'{"version":"1.0","model":{"type":"BPE"}}')
def tokenizer_file(data: bytes) -> None:
    file = MODEL_FOLDER / "other.json"
    file.write_bytes(data)
    with suppress(Unusable):
        HuggingFace(str(file)).count(["one two \u00e9"], special=True)
    (MODEL_FOLDER / "other").mkdir(exist_ok=True)
    (MODEL_FOLDER / "other" / "tokenizer.json").write_bytes(data)
    with suppress(ConfigError):
        made = FileTokenizer(MODEL_FOLDER / "other", 300)
        made.decode(made.encode("one"))


@target("tokens of an answer", b"\x02\x65\xc8\xc9", bytes(range(0, 256, 5)), b"\xf2\x9f\x9a\x82", b"\x00\x01\x02")
def answered(data: bytes) -> None:
    """One text for each token, and together what the tokenizer makes of all: nothing lost, nothing twice."""
    ids = [min(FILE_TOKENIZER.vocab_size - 1, each + 2) if each > 1 else each for each in data]
    ids = [each for each in ids if each < len(VOCABULARY)]
    for decoder in (FILE_TOKENIZER.decoder(), ByteTokenizer(300).decoder()):
        pieces = [decoder.feed(each, last=at == len(ids) - 1) for at, each in enumerate(ids)]
        if len(pieces) != len(ids) or not all(isinstance(piece, str) for piece in pieces):
            raise Found("not one text for each token")
    if _is_text(ids) and "".join(_decoded(ids)) != FILE_TOKENIZER.decode(ids):
        raise Found("the stream's text is not the text of its tokens")


def _decoded(ids: list[int]) -> list[str]:
    decoder = FILE_TOKENIZER.decoder()
    return [decoder.feed(each, last=at == len(ids) - 1) for at, each in enumerate(ids)]


def _is_text(ids: list[int]) -> bool:
    """Whether the tokens are the bytes of whole characters."""
    if not all(2 <= each < 258 for each in ids):
        return False
    try:
        bytes(each - 2 for each in ids).decode()
    except UnicodeDecodeError:
        return False
    return True
