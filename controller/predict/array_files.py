"""Files of plain arrays with a digest, for what a worker learns and a gateway reads: no code is in them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.core.errors import ConfigError

MOST_BYTES = 64 << 20
_DIGEST = hashlib.sha256().digest_size


def to_file(magic: bytes, told: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """`magic`: kind and version of the file. `told`: what is no array, as JSON."""
    raw = io.BytesIO()
    text = json.dumps(dict(told), sort_keys=True).encode()
    np.savez_compressed(raw, allow_pickle=False, told=np.frombuffer(text, dtype=np.uint8), **arrays)
    body = raw.getvalue()
    return magic + hashlib.sha256(body).digest() + body


def from_file(
    magic: bytes, what: str, names: Sequence[str], content: bytes
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What was told, and the arrays of these names. `what`: the file is, for messages. Raises ConfigError for another
    file or version, and for one that is damaged or too large."""
    if not content.startswith(magic):
        raise ConfigError(f"this is no {what} of this version")
    if len(content) > MOST_BYTES:
        raise ConfigError(f"a {what} may have at most {MOST_BYTES} bytes")
    digest, body = content[len(magic) : len(magic) + _DIGEST], content[len(magic) + _DIGEST :]
    if hashlib.sha256(body).digest() != digest:
        raise ConfigError(f"the {what} is damaged: its digest is another one")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            return dict(json.loads(arrays["told"].tobytes())), {name: arrays[name] for name in names}
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"the {what} cannot be read: {error}") from error
