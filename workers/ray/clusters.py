"""The Ray clusters of RAY_ADDRESS, and their tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from controller.core.errors import ConfigError
from controller.engine.placement import dashboards

ADDRESS, TOKENS = "RAY_ADDRESS", "RAY_TOKENS_DIR"
LARGEST = 4096  # bytes of a token's file
_TOKEN = re.compile(r"[!-~]{1,4000}")  # visible ASCII: it becomes a line of a header


@dataclass(frozen=True, slots=True)
class RayCluster:
    """`url`: of its dashboard, which has the Jobs REST. `token`: that it asks for; "": none."""

    name: str
    url: str
    token: str = field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def clusters(addresses: str, folder: Path) -> dict[str, RayCluster]:
    """By name. `addresses`, RAY_ADDRESS: a URL, of the cluster `default`, or `name=URL` for each, separated by commas.
    `folder`, RAY_TOKENS_DIR: where their tokens are, in files of their names.

    Raises ConfigError for an address that is none and a token that cannot be read.
    """
    found: dict[str, RayCluster] = {}
    for name, url in dashboards(addresses):
        if name in found:
            raise ConfigError(f"{ADDRESS} names the cluster {name} twice", ADDRESS)
        found[name] = RayCluster(name, _checked(url), _token(folder / name, name))
    return found


def _checked(url: str) -> str:
    try:
        split = urlsplit(url)
        fine = split.scheme in ("http", "https") and split.hostname and not (split.username or split.query)
        _ = split.port
    except ValueError:
        fine = False
    if not fine:
        told = f"{ADDRESS}: {url.rpartition('@')[2]!r} is no URL of a dashboard, such as http://10.0.0.1:8265"
        raise ConfigError(told, ADDRESS)
    return url.rstrip("/")


def _token(path: Path, name: str) -> str:
    try:
        value = path.read_bytes()[:LARGEST].decode("ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token of cluster {name} cannot be read in {TOKENS}: {type(error).__name__}") from None
    if not _TOKEN.fullmatch(value):
        raise ConfigError(f"the token of cluster {name} in {TOKENS} must be one word of visible characters")
    return value
