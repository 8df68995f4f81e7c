"""A program that serves /health and ends on SIGTERM, or does what its first argument says. Standard library only."""

import http.server
import os
import sys
import time

PORT, HOW = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "serve"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        keyed = not os.environ.get("KEY") or self.headers.get("Authorization") == f"Bearer {os.environ['KEY']}"
        self.send_response(200 if keyed else 401)
        self.end_headers()


if HOW == "dies":
    print("no such model", flush=True)
    sys.exit(3)
if HOW == "leaks":
    print(f"the secret is {os.environ['TOKEN']} and the key {os.environ['KEY']}", flush=True)
if HOW == "forks" and os.fork() == 0:
    os.write(1, f"child {os.getpid()}\n".encode())  # at once, so that it is a line of its own
    time.sleep(600)
if HOW == "silent":
    time.sleep(600)
os.write(1, f"listening on {PORT}\n".encode())
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
