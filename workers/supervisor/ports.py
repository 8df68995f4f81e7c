"""Ports of `make up`: those of gateway and console are fixed and must be free; all others are chosen, and stored in
DATA_DIR/ports.json."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from pathlib import Path

from controller.core.errors import ConfigError

HOST = "127.0.0.1"


# Below those of outgoing connections, which would take a chosen port before its server listens.
CHOSEN = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port on loopback that is free now. At random, so that programs that choose at once choose differently."""
    return next(port for port in iter(lambda: secrets.choice(CHOSEN), None) if is_free(port))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"cannot listen on {HOST}:{port}: {error.strerror}", "port") from error
    return True


def require_free(port: int, variable: str) -> None:
    if not is_free(port):
        raise ConfigError(
            f"port {port} is in use by another program: stop it, or choose another port with {variable}=...", variable
        )


def write_json(path: Path, content: object) -> None:
    """Write the file atomically, so that other processes never read half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
