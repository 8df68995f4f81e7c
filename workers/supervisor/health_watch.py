"""Health checks of an engine that was ready: whether it still answers. Nobody waits for them, since one thread watches
all engines and starts processes."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from workers.supervisor.ports import HOST

EVERY_S, CHECK_S = 2.0, 5.0  # between two checks; of one
UNHEALTHY_S, FAILED = 10.0, 2  # without a good answer, and checks that failed in a row: the watcher may stall itself
STATUS_BYTES, MOST_BYTES = 13, 1 << 16  # `HTTP/1.1 200 `; of an answer


class HealthWatch:
    """One engine. `headers`: of the GET request. Times are seconds of a monotonic clock."""

    def __init__(self, port: int, path: str, headers: Mapping[str, str], now: float) -> None:
        lines = [f"GET {path} HTTP/1.1", f"Host: {HOST}:{port}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._request = "\r\n".join([*lines, "", ""]).encode()
        self._port, self._path = port, path
        self._call: socket.socket | None = None
        self._to_send, self._answer = b"", b""
        self._began = self._good_at = now
        self._failed = 0

    def error(self, now: float) -> str:
        """Why the engine counts as unhealthy, "" while it does not. Begins and continues checks; call it often."""
        if self._call is None:
            if now - self._began >= EVERY_S:
                self._begin(now)
        else:
            self._go_on(self._call, now)
        for_s = now - self._good_at
        if self._failed < FAILED or for_s <= UNHEALTHY_S:
            return ""
        return f"GET {self._path} has not been answered with status 200 for {UNHEALTHY_S:g} s"

    def close(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call = None

    def _begin(self, now: float) -> None:
        self._began, self._to_send, self._answer = now, self._request, b""
        self._call = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._call.setblocking(False)
        self._call.connect_ex((HOST, self._port))  # a failure shows when it is written to
        self._go_on(self._call, now)

    def _go_on(self, call: socket.socket, now: float) -> None:
        try:
            while self._to_send:
                self._to_send = self._to_send[call.send(self._to_send) :]
            while len(self._answer) < MOST_BYTES:
                if not (part := call.recv(MOST_BYTES)):
                    return self._ended(now)
                self._answer += part
            self._ended(now)
        except (BlockingIOError, InterruptedError):
            if now - self._began >= CHECK_S:
                self._ended(now)
        except OSError:
            self._ended(now)

    def _ended(self, now: float) -> None:
        self.close()
        good = self._answer.startswith(b"HTTP/1.") and self._answer[:STATUS_BYTES].split(b" ")[1:2] == [b"200"]
        self._failed = 0 if good else self._failed + 1
        self._good_at = now if good else self._good_at
