"""What a vLLM 0.33 with sleep mode does, over a real socket: verbs, tags, metrics, and what it does to those who err.

From vLLM's own source (serve/dev, v1/engine/core.py, v1/executor/abstract.py): `/health` is 200 in any state; requests
to a sleeper wait; a second `/sleep` with weights asleep does nothing (but the gauge tells the new level); `/wake_up`
with a tag that is not asleep does nothing at all; scheduling goes on only when everything is resident; after level 2
the weights' memory holds garbage until `reload_weights`; every verb is 404 without development mode. Without sleep mode
(seen on a real one on CPUs) `/sleep` is answered as ever and the gauge follows, but memory stays as it is.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

LEVELS = {1: "weights_offloaded", 2: "discard_all"}
TAGS = {"weights", "kv_cache"}


class SleepingVllm:
    """`with SleepingVllm() as vllm: vllm.url`. `verbs`: what it was told, in order."""

    def __init__(
        self,
        *,
        dev_mode: bool = True,
        sleep_mode: bool | None = True,
        reload_s: float = 0.0,
        wake_s: float = 0.0,
        sleep_s: float = 0.0,
    ):
        self.sleep_mode = sleep_mode  # how it was started; None: a version that does not say
        self.dev_mode, self.reload_s, self.wake_s, self.sleep_s = dev_mode, reload_s, wake_s, sleep_s
        self.verbs: list[str] = []
        self.bodies: list[bytes] = []
        self.asleep: set[str] = set()
        self.paused = False
        self.gauge = "awake"
        self.garbage = False
        self.prefix_cached = 0  # blocks the prefix cache knows
        self.running = 0
        self.deaf = False  # takes verbs and does nothing
        self.away = False  # its metrics cannot be read
        self.fail: dict[str, tuple[int, str]] = {}  # verb: status and body
        self.moving = {"sleep": 0, "wake": 0}
        self._core = threading.Lock()  # the engine core carries out one thing at a time
        self._resident = threading.Event()
        self._resident.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.get(self)

            def do_POST(self) -> None:
                fake.post(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> SleepingVllm:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._resident.set()
        self._server.shutdown()
        self._server.server_close()

    def restart(self) -> None:
        """The process was started again: awake, with whole weights."""
        self.asleep, self.garbage, self.gauge, self.paused, self.prefix_cached = set(), False, "awake", False, 0
        self._resident.set()

    # ---- what it is told ------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> dict[str, object]:
        with self._core:
            time.sleep(self.sleep_s)
            if not self.deaf:
                self.paused, self.running = True, 0
                self._resident.clear()
                if level and "weights" not in self.asleep:
                    self.asleep |= TAGS
                    self.prefix_cached, self.garbage = 0, self.garbage or (level == 2 and bool(self.sleep_mode))
                self.gauge = LEVELS.get(level, "paused")
        return {"status": "sleeping", "level": level}

    def wake_up(self, tags: list[str] | None) -> dict[str, object]:
        with self._core:
            time.sleep(self.wake_s)
            named = [tag for tag in tags or () if tag != "scheduling"]
            if not self.deaf and (tags is None or all(tag in self.asleep for tag in named)):
                self.asleep -= set(named) if tags is not None else TAGS
            if not self.asleep and not self.deaf:
                self.paused, self.gauge = False, "awake"
                self._resident.set()
        return {"status": "sleeping" if self.asleep else "awake", "tags": tags}

    def reload_weights(self) -> dict[str, object]:
        with self._core:
            time.sleep(self.reload_s)
            self.garbage = False
            self.prefix_cached = 3  # stale: keys of blocks whose KV is gone
        return {"results": [None]}

    def reset_prefix_cache(self) -> dict[str, object]:
        with self._core:
            self.prefix_cached = 0
        return {"success": True}

    # ---- HTTP -----------------------------------------------------------------------------------------------------

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        if path == "/health":
            return _answer(handler, 200, "")
        if path == "/metrics" and self.away:
            return _answer(handler, 500, "")
        if path == "/metrics":
            return _answer(handler, 200, self._metrics(), "text/plain")
        if path == "/is_sleeping" and self.dev_mode:
            return _answer(handler, 200, json.dumps({"is_sleeping": self.paused or bool(self.asleep)}))
        if path == "/server_info" and self.dev_mode:
            model = {} if self.sleep_mode is None else {"enable_sleep_mode": self.sleep_mode}
            return _answer(handler, 200, json.dumps({"vllm_config": {"model_config": model}}))
        return _answer(handler, 404, '{"detail":"Not Found"}')

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.bodies.append(body)
        query = parse_qs(split.query)
        if split.path == "/v1/completions":
            return self._complete(handler)
        verb = split.path.removeprefix("/")
        if not self.dev_mode or verb not in ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache"):
            return _answer(handler, 404, '{"detail":"Not Found"}')
        self.verbs.append(verb + (f"?{split.query}" if split.query else ""))
        if verb in self.fail:
            return _answer(handler, *self.fail[verb])
        return _answer(handler, 200, json.dumps(self._carried_out(verb, query, body)))

    def _carried_out(self, verb: str, query: dict[str, list[str]], body: bytes) -> dict[str, object]:
        if verb == "collective_rpc":
            assert json.loads(body) == {"method": "reload_weights"}
            return self.reload_weights()
        if verb == "reset_prefix_cache":
            return self.reset_prefix_cache()
        operation = "sleep" if verb == "sleep" else "wake"
        self.moving[operation] += 1
        try:
            return self.sleep(int(query["level"][0])) if verb == "sleep" else self.wake_up(query.get("tags"))
        finally:
            self.moving[operation] -= 1

    def _complete(self, handler: BaseHTTPRequestHandler) -> None:
        """Waits while it sleeps, as a queued request does; says whether a client would have got nonsense."""
        self._resident.wait(30)
        wrong = "garbage" if self.garbage else "stale prefix" if self.prefix_cached else "good"
        _answer(handler, 200, json.dumps({"choices": [{"text": wrong}]}))

    def _metrics(self) -> str:
        states = "\n".join(
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{name}"}} {float(name == self.gauge)}'
            for name in ("awake", *LEVELS.values())
        )
        moving = "\n".join(
            f'vllm:sleep_mode_operations_in_flight{{operation="{name}"}} {float(count)}'
            for name, count in self.moving.items()
        )
        counts = f'vllm:num_requests_running{{engine="0"}} {float(self.running)}\nvllm:num_requests_waiting{{}} 0.0'
        return f"# HELP x\n{states}\n{moving}\n{counts}\n"


def _answer(handler: BaseHTTPRequestHandler, status: int, text: str, kind: str = "application/json") -> None:
    raw = text.encode()
    try:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)
    except OSError:
        pass  # the caller has gone: what it asked for was done all the same
