"""The load of bench-restart: it moves from one server to another and tells what each answered."""

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.restart.load import FirstHealthy, SteadyLoad
from workers.supervisor.ports import free_port


@pytest.fixture
def serve():
    """Starts a server that answers with a status and counts the paths; returns its URL and the counts."""
    servers = []

    def start(status=200, port=0):
        counts = Counter()

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def do_GET(self):
                counts[self.path] += 1
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *parts):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", counts

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def until(done):
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_load_moves_to_where_the_gateway_comes_back(serve):
    first, counts = serve()
    port = free_port()
    gone = f"http://127.0.0.1:{port}"
    with SteadyLoad(first, "key", [b"{}"], 200.0) as load:
        until(lambda: counts["/v1/completions"] >= 5)
        load.url = gone
        moved = time.monotonic()
        until(lambda: any(url == gone for url, *_ in list(load.ended)))
        back, _ = serve(port=port)
        answered = load.first_answer(back, 10.0)
    assert load.failed(first, 0.0) == 0
    assert load.failed(back, moved) >= 1
    assert load.failed(back, answered) == 0
    assert answered == min(done for url, _, done, well in load.ended if url == back and well)


def test_refusals_are_no_answers(serve):
    url, counts = serve(503)
    with SteadyLoad(url, "key", [b"{}"], 200.0) as load:
        until(lambda: counts["/v1/completions"] >= 3)
        with pytest.raises(TimeoutError, match="answered no request"):
            load.first_answer(url, 0.1)
    assert load.failed(url, 0.0) == len(load.ended) >= 3


def test_when_a_server_is_healthy_first(serve):
    port = free_port()
    with FirstHealthy(f"http://127.0.0.1:{port}") as healthy:
        time.sleep(0.05)
        assert healthy.at is None
        began = time.monotonic()
        serve(port=port)
        until(lambda: healthy.at is not None)
    assert healthy.at >= began
