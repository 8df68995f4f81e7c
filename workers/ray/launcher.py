"""What the job of an engine runs on its node: it starts the engine, reports on it, and ends it when its lease is over.

It is sent as text in the job's command, so a node needs a Python and the engine, and no Slackline. Standard library
only, Python 3.9 or newer.

The order is public, since whoever reads the cluster's Jobs API reads it. It has no secret: the token that calls must
show is in it as a SHA-256, the engine's key comes with the first lease, and other secrets are files on the node. The
engine starts with the first lease, so a job that somebody submits again starts nothing.

Ray kills the process group of a job's command a second after its supervisor died. So the launcher runs in a session of
its own and can drain: it is an orphan once its first process is gone.

Calls on the control port, the one above the engine's: `GET /whose` tells the hash of the token, then, all with
`Authorization: Bearer TOKEN`, `POST /lease` ({"host", "key"}) renews, `GET /status`, `GET /log`, `POST /end`
({"wait_s", "grace_s"}).
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import hmac
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from typing import Any

SAYS = "slackline: "
PORTS = range(20000, 32000, 2)  # below those of outgoing connections, above Ray's workers
PORTS_TRIED = 16
LOG_BYTES, LARGEST_SECRET, LINE_HIDDEN = 64 << 10, 16384, 8
HEALTH_S, HEALTH_TIMEOUT_S, UNHEALTHY_S = 0.5, 2.0, 10.0
CALLS, CALLS_OF_ADDRESS, CALL_S = 64, 16, 10.0  # to the control port at once; seconds of one, all in all
TICK_S, GRACE_S, TOLD_S = 0.1, 15.0, 5.0  # TOLD_S: an end is reported this long before the launcher exits
LEASE_OVER, NEVER_LEASED, REFUSED = 75, 76, 2  # exit codes
GUARD = "import os,sys;sys.stdin.read()\ntry: os.killpg(int(sys.argv[1]), 9)\nexcept OSError: pass"


def say(text: str) -> None:
    print(SAYS + text, flush=True)


class StartRefused(Exception):
    """The engine cannot be started; the text says why."""


class EngineOutput:
    """The end of what the engine printed, without secrets, and when its start reached which step."""

    def __init__(self, steps: dict[str, str]) -> None:
        self.patterns = {name: re.compile(pattern) for name, pattern in steps.items()}
        self.hidden: list[str] = []
        self.reached: dict[str, float] = {}  # monotonic seconds
        self.lines: collections.deque[str] = collections.deque()
        self.size, self.cut, self.at = 0, False, 0.0
        self.lock = threading.Lock()

    def read(self, pipe: Any) -> None:
        """Until its end. Of a line that is longer than LOG_BYTES, so much is held back as could begin a secret."""
        longest, held = max(map(len, self.hidden), default=1), ""
        for raw in iter(lambda: pipe.readline(LOG_BYTES), b""):
            text = held + raw.decode(errors="replace")
            for value in self.hidden:
                text = text.replace(value, "[secret]")
            passed = len(text) if raw.endswith(b"\n") else max(0, len(text) - longest + 1)
            text, held = text[:passed], text[passed:]
            self.keep(text)
            for name, pattern in self.patterns.items():
                if name not in self.reached and pattern.search(text):
                    self.reached[name] = time.monotonic()
        self.keep(held)

    def keep(self, text: str) -> None:
        if not text:
            return
        with self.lock:
            self.at = time.time()
            self.lines.append(text)
            self.size += len(text)
            while self.size > LOG_BYTES and len(self.lines) > 1:
                self.size -= len(self.lines.popleft())
                self.cut = True

    def tail(self) -> dict[str, Any]:
        with self.lock:
            return {"text": "".join(self.lines), "cut": self.cut, "written_at": self.at}

    def last_line(self) -> str:
        with self.lock:
            lines = [line.strip() for line in list(self.lines)[-50:] if line.strip()]
        return lines[-1][:300] if lines else ""


class EngineRun:
    """The process, in a session of its own, with a guard that kills that session if the launcher dies."""

    def __init__(self, order: dict[str, Any], host: str, port: int, key: str) -> None:
        self.path, self.host, self.port = order["health_path"], host, port
        values = {"host": host, "port": str(port), "python": sys.executable}
        fill = lambda text: string.Template(text).substitute(values)  # noqa: E731
        secrets = {name: secret(named) for name, named in order["secrets"].items()}
        variable = order.get("key_variable", "")
        keyed = {variable: key} if variable and key else {}
        plain = {name: fill(value) for name, value in order["environment"].items()}
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **plain, **secrets, **keyed}
        self.headers = {"Authorization": "Bearer " + key} if keyed else {}
        command = [fill(each) for each in order["command"]]
        # An empty entry would mean the job's working folder.
        folders = [*env.get("ENGINE_PATH", "").split(os.pathsep), *env.get("PATH", os.defpath).split(os.pathsep)]
        program = shutil.which(command[0], path=os.pathsep.join(filter(None, folders)))
        if program is None:
            raise StartRefused(f"the program {command[0]} was not found on this node")
        self.output = EngineOutput(order.get("steps", {}))
        known = [*secrets.values(), *keyed.values()]
        lines = [line for value in known for line in value.splitlines() if len(line) >= LINE_HIDDEN]
        forms = [form for each in [*known, *lines] for form in written(each)]
        # The longest first: one may be the beginning of another.
        self.output.hidden = sorted(dict.fromkeys(filter(None, forms)), key=len, reverse=True)
        try:
            self.process = subprocess.Popen(
                [program, *command[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise StartRefused(f"{command[0]} cannot be run: {error.strerror}") from None
        guard = [sys.executable, "-c", GUARD, str(self.process.pid)]
        self.guard = subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.began = self.output.reached["process"] = time.monotonic()
        self.ready = self.failing = False
        self.good_at = time.monotonic()
        self.reader = threading.Thread(target=self.output.read, args=(self.process.stdout,), daemon=True)
        self.reader.start()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while self.process.poll() is None:
            if self.healthy():
                if not self.ready:
                    self.output.reached["ready"] = time.monotonic()
                self.ready, self.failing, self.good_at = True, False, time.monotonic()
            elif self.ready and time.monotonic() - self.good_at > UNHEALTHY_S:
                self.failing = True
            time.sleep(HEALTH_S)

    def healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", self.path, headers=self.headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)

    def over(self) -> bool:
        """Whether it has ended; whatever it started ends with it."""
        if self.process.poll() is None:
            return False
        self.signal(signal.SIGKILL)
        self.reader.join(1.0)
        return True


def written(text: str) -> tuple[str, ...]:
    """As it is, and as JSON and Python write it in a text."""
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]


def secret(name: str) -> str:
    """Raises StartRefused, without the value."""
    folder = os.environ.get("ENGINE_SECRETS_DIR", "")
    if not folder:
        raise StartRefused(f"the secret {name}: ENGINE_SECRETS_DIR is not set where Ray runs on this node")
    try:
        with open(os.path.join(folder, name), "rb") as file:
            value = file.read(LARGEST_SECRET).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefused(f"the secret {name} cannot be read on this node: {type(error).__name__}") from None
    if not value or "\0" in value:
        raise StartRefused(f"the secret {name} is empty on this node")
    return value


class Launcher:
    """`parent`: the first process of the job; None: not watched."""

    def __init__(self, order: dict[str, Any], parent: int | None = None) -> None:
        self.order, self.parent = order, parent
        self.lock = threading.Lock()
        self.engine: EngineRun | None = None
        self.error = ""
        self.code: int | None = None
        self.began = self.renewed = time.monotonic()
        self.orphan_at: float | None = None
        self.end_at: float | None = None  # when it is asked to end; kill_at: then, when it is killed
        self.kill_at: float | None = None
        self.grace_s = GRACE_S
        self.server, self.port = bound(self)

    # -- calls ---------------------------------------------------------------------------------------------------

    def allows(self, header: str) -> bool:
        shown = hashlib.sha256(header.removeprefix("Bearer ").encode()).hexdigest()
        return hmac.compare_digest(shown, self.order["token_sha256"])

    def lease(self, told: dict[str, Any]) -> None:
        with self.lock:
            self.renewed = time.monotonic()
            if self.engine is None and self.code is None and self.end_at is None:
                try:
                    self.engine = EngineRun(self.order, str(told["host"]), self.port, str(told.get("key", "")))
                except StartRefused as error:
                    self.error, self.code = str(error), REFUSED
                except (KeyError, ValueError) as error:
                    self.error, self.code = f"the order is not valid: {type(error).__name__} {error}", REFUSED

    def end(self, told: dict[str, Any]) -> None:
        """The earlier of two ends applies, so that it can be told again."""
        with self.lock:
            at, self.grace_s = time.monotonic() + float(told.get("wait_s", 0.0)), float(told.get("grace_s", GRACE_S))
            self.end_at = at if self.end_at is None else min(at, self.end_at)
            if self.kill_at is not None:
                self.kill_at = min(self.kill_at, time.monotonic() + self.grace_s)

    def status(self) -> dict[str, Any]:
        engine = self.engine
        state = "waiting"
        if self.code is not None:
            state = "ended"
        elif self.kill_at is not None or (self.end_at is not None and engine is None):
            state = "ending"
        elif engine is not None:
            state = "starting" if not engine.ready else "unhealthy" if engine.failing else "ready"
        known: dict[str, Any] = {}
        if engine is not None:  # its age, and steps by seconds after its start: clocks of nodes differ, and are set
            steps = {name: at - engine.began for name, at in list(engine.output.reached.items())}
            known = {"age_s": time.monotonic() - engine.began, "steps_s": steps, "pid": engine.process.pid}
        return {
            **{"id": self.order["id"], "state": state, "port": self.port, "exit_code": self.code},
            **{"error": self.error, "orphan": self.orphan_at is not None, **known},
        }

    def log(self) -> dict[str, Any]:
        return self.engine.output.tail() if self.engine else {"text": "", "cut": False, "written_at": 0}

    # -- the life of the engine ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the engine has ended. Returns the exit code of the job."""
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        say(f"control port {self.port + 1}")
        while self.code is None:
            time.sleep(TICK_S)
            with self.lock:
                self.step(time.monotonic())
        if self.engine is not None:
            sys.stdout.write(self.engine.output.tail()["text"][-4000:] + "\n")
        say(f"ended: {self.error or 'stopped'}")
        if self.orphan_at is not None:
            time.sleep(TOLD_S)
        return 0 if self.code == 0 else min(255, 128 - self.code if self.code < 0 else self.code)

    def step(self, now: float) -> None:
        if self.orphan_at is None and self.parent is not None and os.getppid() != self.parent:
            self.orphan_at = now
        if self.code is not None:
            return
        if self.engine is not None and self.engine.over():
            asked = self.kill_at is not None
            self.code = 0 if asked and not self.error else self.engine.process.returncode or (1 if self.error else 0)
            self.error = self.error or ("" if asked else self.engine.output.last_line() or f"exit code {self.code}")
            return
        if self.end_at is None:
            self.expire(now)
        if self.end_at is not None and now >= self.end_at and self.kill_at is None:
            if self.engine is None:
                self.code = 0 if not self.error else NEVER_LEASED
                return
            self.kill_at = now + self.grace_s
            self.engine.signal(signal.SIGTERM)
        if self.kill_at is not None and now >= self.kill_at and self.engine is not None:
            self.engine.signal(signal.SIGKILL)

    def expire(self, now: float) -> None:
        order = self.order
        if self.engine is None:
            if now - self.began > order["first_lease_s"]:
                self.end_at, first_s = now, order["first_lease_s"]
                self.error = f"no worker of Slackline has called within {first_s:g} s: they must reach this node"
            return
        since, limit_s = self.renewed, order["lease_s"]
        if self.orphan_at is not None and order["orphan_s"] < limit_s:
            since, limit_s = max(self.renewed, self.orphan_at), order["orphan_s"]
        if now - since > limit_s:
            self.end_at, self.error = now, f"its lease was not renewed for {limit_s:g} s"


class ControlServer(http.server.ThreadingHTTPServer):
    """Anybody on the engines' network may connect. A call beyond the bounds is closed unread, and strangers at one
    address leave room for the workers at others."""

    daemon_threads = True
    allow_reuse_address = True  # of connections that are closed; two never listen at one
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open: collections.Counter[str] = collections.Counter()  # calls by address
        self.counting = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.counting:
            full = sum(self.open.values()) >= CALLS or self.open[client_address[0]] >= CALLS_OF_ADDRESS
            if not full:
                self.open[client_address[0]] += 1
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.counting:
                self.open[client_address[0]] -= 1
                if not self.open[client_address[0]]:
                    del self.open[client_address[0]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is nothing for the engine's log."""


def cut_off(connection: socket.socket) -> None:
    """Whatever reads or writes it ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class ControlHandler(http.server.BaseHTTPRequestHandler):
    """Answers the calls of a worker. Workers call once a second, so their connections are kept; those of strangers are
    not."""

    launcher: Launcher
    protocol_version = "HTTP/1.1"
    timeout = CALL_S
    wbufsize = -1  # an answer is sent as one piece
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        end = threading.Timer(CALL_S, cut_off, [self.connection])
        end.daemon = True
        end.start()
        try:
            super().handle_one_request()
        finally:
            end.cancel()

    def answer(self, status: int, body: dict[str, Any], keep: bool = False) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if not keep or self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def body(self) -> bytes:
        """All of it: what is left would be taken for the next call. Raises ValueError."""
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= LOG_BYTES or "Transfer-Encoding" in self.headers:
            raise ValueError(f"a body has a length of at most {LOG_BYTES} bytes")
        return self.rfile.read(size)

    def do_GET(self) -> None:
        self.called({"/status": lambda _: None, "/log": None})

    def do_POST(self) -> None:
        self.called({"/lease": self.launcher.lease, "/end": self.launcher.end})

    def called(self, calls: dict[str, Any]) -> None:
        if self.path == "/whose":  # asked before a token is shown
            self.answer(200, {"token_sha256": self.launcher.order["token_sha256"]})
            return
        if not self.launcher.allows(self.headers.get("Authorization", "")):
            self.answer(401, {"error": "the token is wrong"})
            return
        if self.path not in calls:
            self.answer(404, {"error": "unknown path"})
            return
        try:
            told = json.loads(self.body() or "{}")
            if calls[self.path] is not None:
                calls[self.path](told)
        except (ValueError, TypeError, AttributeError) as error:
            self.answer(400, {"error": str(error)})
            return
        self.answer(200, self.launcher.status() if calls[self.path] is not None else self.launcher.log(), keep=True)


def handler_of(launcher: Launcher) -> type[ControlHandler]:
    return type("Handler", (ControlHandler,), {"launcher": launcher})


def bound(launcher: Launcher) -> tuple[http.server.ThreadingHTTPServer, int]:
    """The control server, and the engine's port below its own. Ports are taken in pairs with an even first, so that two
    launchers on a host never meet."""

    handler = handler_of(launcher)
    for port in ports_of(launcher.order["id"]):
        try:
            server = ControlServer(("0.0.0.0", port + 1), handler)
        except OSError:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                server.server_close()
                continue
        return server, port
    raise SystemExit(f"none of the ports of {launcher.order['id']} is free: {ports_of(launcher.order['id'])}")


def ports_of(id: str) -> list[int]:
    """Where the engine of this instance may listen: workers look there, since Ray has no way to tell them a port."""
    digests = [hashlib.sha256(f"{id}:{number}".encode()).digest() for number in range(PORTS_TRIED)]
    return [PORTS[int.from_bytes(each[:8], "big") % len(PORTS)] for each in digests]


def main(order: dict[str, Any]) -> None:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        launcher = Launcher(order, parent)
        signal.signal(signal.SIGTERM, lambda *_: launcher.end({}) if not launcher.lock.locked() else None)
        os._exit(launcher.run())
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    main(json.loads(base64.b64decode(os.environ.pop("SLACKLINE_ORDER"))))
